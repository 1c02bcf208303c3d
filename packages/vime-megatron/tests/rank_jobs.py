"""What a rank process does in a test; run by the ``ranks`` fixture with ``ORDER`` set."""

from __future__ import annotations

import importlib.util
import resource
import signal
import sys
from pathlib import Path

import torch
from vime_megatron import MegatronTrainer, OptimizerSettings, TrainerConfig

torch.set_num_threads(1)


def _conftest():
    spec = importlib.util.spec_from_file_location("megatron_conftest", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def policy_loss(logprobs_t, entropy_t, fields):
    """A loss that uses everything a loss is given, and looks at whole sequences."""
    weight_t = fields["weight"]
    loss = -(weight_t * (fields["advantage"] * logprobs_t + 0.1 * entropy_t)).sum()
    whole_s = weight_t.new_zeros(16).index_add(0, fields["sequence"].long(), weight_t * logprobs_t)
    loss = loss + whole_s.square().sum()  # wrong as soon as one sequence is seen in two parts
    return loss, {"entropy": (weight_t * entropy_t).sum(), "tokens": (weight_t > 0).sum()}


def _trainer(order, model, settings, optimizer):
    """Make a rank's trainer: on the CPU, or with ``device="cuda"`` on the GPU of the rank's number."""
    config = TrainerConfig(
        model=Path(model),
        optimizer=OptimizerSettings(**optimizer),
        **{"dtype": "float32", "timeout_s": 60.0, "device": "cpu"} | settings,
    )
    keys = ("rank", "world_size", "init_method")
    index = order["rank"] if config.device == "cuda" else 0
    return MegatronTrainer(config, **{key: order[key] for key in keys}, device_index=index)


def train(order, *, model, settings, optimizer, steps=2, export=None, save=None, load=None):
    """Take steps; return metrics, logprobs of this rank's shard, and optionally load, export and save."""
    trainer = _trainer(order, model, settings, optimizer)
    batch = _conftest().make_batch()
    if load:
        trainer.load(load)
    metrics = [trainer.step(batch, policy_loss) for _ in range(steps)]
    if export:
        trainer.export_hf(export)
    if save:
        trainer.save(save)
        trainer.load(save)
    result = {
        "loss": [m.loss for m in metrics],
        "grad_norm": [m.grad_norm for m in metrics],
        "entropy": [m.metrics["entropy"] for m in metrics],
        "tokens": [m.metrics["tokens"] for m in metrics],
        "logprobs": trainer.logprobs(batch),
        "pieces": _pieces(trainer),
    }
    trainer.close()
    return result


def _pieces(trainer):
    source = trainer.source()
    return {
        tensor.name: [(piece.box.start, source.view(piece.region).cpu().clone()) for piece in tensor.pieces]
        for tensor in source.tensors
    }


def updates(order, *, steps, **arguments):
    """The same updates twice, in one pass and by Megatron."""
    return [
        _updates(order | {"init_method": f"{order['init_method']}-{own}"}, own, steps, **arguments)
        for own in (True, False)
    ]


def _updates(order, own, steps, *, model, settings, optimizer):
    """Update with gradients that are drawn; every third is small enough not to be clipped."""
    from dataclasses import replace

    from vime_megatron.kernels import plain
    from vime_megatron.update import apply_update, gradient_norm, prepare_update

    trainer = _trainer(order, model, {"dtype": "bfloat16"} | settings, optimizer)
    kernels = replace(trainer._kernels, adamw=plain.adamw if own else None)
    draw, limit, device = torch.Generator().manual_seed(7), trainer.config.optimizer.clip_grad, torch.device("cpu")
    clipped = []
    for step in range(steps):
        trainer.optimizer.zero_grad()
        with trainer._platform.active():
            for param in trainer.params.values():
                scale = 1e-4 if step % 3 == 2 else 1.0
                param.main_grad.copy_(scale * torch.randn(param.shape, generator=draw))
            norm = float(gradient_norm(trainer.optimizer, device))
            update = prepare_update(trainer.optimizer, kernels)
            trainer.scheduler.step(increment=1)
            apply_update(update, kernels, norm=norm, limit=limit, device=device)
        clipped.append(norm > limit)
    kept = {f"weight {name}": {"value": param.detach().clone()} for name, param in trainer.params.items()}
    for number, part in enumerate(trainer.optimizer.chained_optimizers):
        masters = [master for group in part.optimizer.param_groups for master in group["params"]]
        for place, master in enumerate(masters):
            kept[f"master {number}.{place}"] = {"value": master.detach(), **part.optimizer.state[master]}
    trainer.close()
    return {"clipped": clipped, "own": bool(update.own), "state": kept}


def float16(order, *, model, settings, optimizer, start):
    """Three steps from a loss scale that may overflow."""
    from vime_megatron.loss_scale import LossScale

    trainer = _trainer(order, model, {"dtype": "float16"} | settings, optimizer)
    trainer.state.loss_scale = LossScale(start, window=2)
    metrics = [trainer.step(_conftest().make_batch(), policy_loss) for _ in range(3)]
    trainer.close()
    return {name: [getattr(m, name) for m in metrics] for name in ("loss", "grad_norm", "loss_scale", "redos")}


def _fill_the_disk():
    """Let no file of this process grow beyond a kilobyte; Python would cut short what it compiles, and keep that."""
    sys.dont_write_bytecode = True
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def _free_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def background(order, *, model, folder):
    """A step runs while a checkpoint is written behind it; then one rank cannot write the next one."""
    from vime_megatron import CheckpointError

    trainer = _trainer(order, model, {"tensor_parallel": 2}, {"lr": 1e-2})
    batch = _conftest().make_batch()
    trainer.step(batch, policy_loss)
    handle = trainer.save(folder, asynchronous=True)
    wanted = trainer.step(batch, policy_loss).loss
    handle.wait(60.0)
    if order["rank"] == 1:
        _fill_the_disk()
    said = []
    for asynchronous in (False, True):
        try:
            trainer.save(folder, asynchronous=asynchronous).wait(60.0)
        except CheckpointError as error:
            said.append(str(error))
    trainer.load(folder)  # neither failure is raised again, and the first checkpoint is whole
    found = trainer.step(batch, policy_loss).loss
    trainer.close()
    if order["rank"] == 1:
        _free_the_disk()
    return {"said": said, "wanted": wanted, "found": found}


def failing(order, *, model, settings):
    """A loss raises on the last rank, in its second micro-batch; then a step goes well."""
    trainer = _trainer(order, model, settings, {"lr": 1e-2})
    batch, calls = _conftest().make_batch(), []

    def loss(*given):
        calls.append(given)
        if order["rank"] == order["world_size"] - 1 and len(calls) == 2:
            raise ValueError("there is no such field")
        return policy_loss(*given)

    said = ""
    try:
        trainer.step(batch, loss)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    done = trainer.state.step
    metrics = [trainer.step(batch, policy_loss) for _ in range(2)]
    trainer.close()
    return {"said": said, "done": done, "losses": [(m.loss, m.grad_norm) for m in metrics]}


def one_rank_cannot(order, *, model, empty, folder):
    """Rank 1 finds no weights; then rank 0 cannot write what is sent to it; then rank 1 finds no checkpoint."""
    from vime_megatron import CheckpointError, ModelError

    said = []
    try:
        first = order | {"init_method": order["init_method"] + "-first"}
        _trainer(first, model if order["rank"] == 0 else empty, {"tensor_parallel": 2}, {"lr": 1e-2})
    except ModelError as error:
        said.append(str(error))
    trainer = _trainer(order, model, {"tensor_parallel": 2}, {"lr": 1e-2})
    if order["rank"] == 0:
        _fill_the_disk()
    try:
        trainer.export_hf(f"{folder}/hf", max_file_bytes=4000)  # the first file is full long before the last tensor
    except CheckpointError as error:
        said.append(str(error))
    if order["rank"] == 0:
        _free_the_disk()
    trainer.export_hf(f"{folder}/hf")
    trainer.save(f"{folder}/saved")
    try:
        trainer.load(f"{folder}/{'saved' if order['rank'] == 0 else 'elsewhere'}")
    except CheckpointError as error:
        said.append(str(error))
    trainer.load(f"{folder}/saved")
    trainer.close()
    return {"said": said}


def split_vocabulary(order, *, problem):
    """Logprobs of a vocabulary of 11 rows, four to a rank, one of them padding on the last."""
    import torch.distributed as dist
    from vime_megatron.logprobs import VocabShard, token_logprobs

    rank = order["rank"]
    dist.init_process_group("gloo", init_method=order["init_method"], rank=rank, world_size=order["world_size"])
    hidden, weight, targets, pull = problem
    start, rows = 4 * rank, min(4, 11 - 4 * rank)
    mine = torch.zeros(4, weight.shape[1], dtype=weight.dtype)
    mine[:rows] = weight[start : start + rows]
    hidden, mine = hidden.clone().requires_grad_(), mine.requires_grad_()
    shard = VocabShard(start=start, rows=rows, group=dist.group.WORLD, chunk=3)
    values = token_logprobs(hidden, mine, targets, temperature=1.3, shard=shard)
    grads = torch.autograd.grad((torch.stack(values) * pull).sum(), (hidden, mine))
    dist.destroy_process_group()
    return {"values": [value.detach() for value in values], "hidden": grads[0], "weight": grads[1]}


if "ORDER" in globals():
    given = globals()["ORDER"]
    torch.save(globals()[given["job"]](given, **given["arguments"]), given["out"])
