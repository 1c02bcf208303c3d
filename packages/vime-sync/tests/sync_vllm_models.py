"""Real vLLM models as the workers of any tensor, pipeline and expert parallel layout, in one process on the CPU.

A worker is told who it is by process groups that only know ranks: constructors and weight loaders ask for nothing else.
So the loaders of every rank can be run, and recorded, without starting an engine. Run as a script: prints one JSON line
for each case.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from sync_models import DENSE, MOE, checkpoint, fill, laid_out
from torch.utils._python_dispatch import TorchDispatchMode
from vime_sync.agree import divide
from vime_sync.copying import CopyProgram
from vime_sync.digest import Digest, digest_tensor
from vime_sync.layout import CheckpointTensor, Piece, Region, contiguous_strides, whole
from vime_sync.model import plan_model
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

TIED = DENSE | {"tie_word_embeddings": True, "vocab_size": 100}
BF16 = DENSE | {"dtype": "bfloat16"}
QWEN2 = DENSE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128}
MOE4 = MOE | {"dtype": "bfloat16", "num_attention_heads": 4, "num_key_value_heads": 4}
#: (model, tensor parallel, pipeline parallel, expert parallel)
CASES = {
    "tied": (TIED, 1, 1, False),
    "tied tp2": (TIED, 2, 1, False),
    "tied pp2": (TIED, 1, 2, False),
    "bf16 tp2 pp2": (BF16, 2, 2, False),
    "biases tp2 pp2": (QWEN2, 2, 2, False),
    "experts": (MOE, 1, 1, False),
    "experts tp2": (MOE4, 2, 1, False),
    "experts ep2": (MOE4, 2, 1, True),
    "experts ep4": (MOE4, 4, 1, True),
    "experts ep2 pp2": (MOE4, 2, 2, True),
}
DTYPES = ("float32", "bfloat16")


class Ranks:
    """What a model asks of a process group while it is built and loaded."""

    def __init__(self, rank, world):
        self.rank_in_group = self.rank = self.local_rank = rank
        self.world_size, self.ranks = world, list(range(world))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == world - 1
        self.first_rank, self.last_rank = 0, world - 1
        self.device_group = self.cpu_group = SimpleNamespace(rank=lambda: rank, size=lambda: world)
        self.device = torch.device("cpu")


def configured(config):
    """A vLLM configuration for a model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return EngineArgs(
            model=folder, skip_tokenizer_init=True, dtype=config["dtype"], enforce_eager=True, max_model_len=64
        ).create_engine_config()


@contextlib.contextmanager
def worker(config, tp, pp, experts, tp_rank, pp_rank):
    """A block in which this process is one worker; yields its vLLM configuration."""
    made = configured(config)
    parallel = made.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tp, pp
    parallel.enable_expert_parallel, parallel.rank = experts, pp_rank * tp + tp_rank
    parallel.world_size = tp * pp
    mine = {"_TP": Ranks(tp_rank, tp), "_PP": Ranks(pp_rank, pp), "_EP": Ranks(tp_rank, tp)}
    kept = {name: getattr(parallel_state, name) for name in mine}
    try:
        for name, group in mine.items():
            setattr(parallel_state, name, group)
        with set_current_vllm_config(made):
            yield made
    finally:
        for name, group in kept.items():
            setattr(parallel_state, name, group)


def wrapped(model, made):
    """The worker's model as a receiver sees it; nothing has post-processed it."""
    from vime_sync.vllm_plugin.backend import VllmModel
    from vime_sync.vllm_plugin.loader import ATTRIBUTE

    setattr(model, ATTRIBUTE, {})
    return VllmModel(model, made, torch.device("cpu"))


def weights(config):
    """A checkpoint; Qwen2 has biases where Qwen3 has norms."""
    values = checkpoint(config, 1)
    if config["model_type"] == "qwen2":
        values = {name: t for name, t in values.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
        for name in [name for name in values if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            values[name.replace(".weight", ".bias")] = values[name][:, 0].clone()
    return values


def published(values):
    """A trainer's description of a checkpoint, each tensor a buffer of its own, and the buffers."""
    described, buffers = [], {}
    for name, tensor in values.items():
        shape = tuple(tensor.shape)
        region = Region(0, name, 0, shape, contiguous_strides(shape))
        described.append(CheckpointTensor(name, shape, tensor.dtype, (Piece(whole(shape), region),)))
        buffers[(0, name)] = tensor.reshape(-1)
    return described, buffers


def build(made):
    with set_default_torch_dtype(made.model_config.dtype), torch.device("cpu"):
        model = initialize_model(vllm_config=made)
    return model.requires_grad_(False)


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


class Allocated(TorchDispatchMode):
    """Adds up the bytes of tensors that are made with memory."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default) and not made.is_meta:
            self.nbytes += made.numel() * made.element_size()
        return made


def case(config, tp, pp, experts):
    """One layout: every worker's plan against what its own loaders do, and the workers' shares of the digest."""
    from vime_sync.vllm_plugin.unallocated import require_parameters_only, unallocated

    values = weights(config)
    described, buffers = published(values)
    found = {"ranks": 0, "wrong": [], "reload": [], "bare": [], "allocated": 0, "whole": 0}
    slices, sums = {}, {}
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            with worker(config, tp, pp, experts, tp_rank, pp_rank) as made:
                model = build(made)
                view = wrapped(model, made)
                view.load_weights(values.items())
                expected = {name: bits(tensor) for name, tensor in view.live().items()}
                plan = plan_model(view, described)
                for name in plan.live_names:
                    view.live()[name].fill_(3.0)
                program = CopyProgram(plan, buffers, {name: view.live()[name] for name in plan.live_names})
                digests = program.run(digest="full", phase=0)
                after = {name: bits(tensor) for name, tensor in view.live().items()}
                rank = pp_rank * tp + tp_rank
                found["wrong"] += [f"{rank} {n}" for n in expected if not torch.equal(expected[n], after[n])]
                found["reload"] += list(plan.reload)
                found["experts"] = [t.shape[0] for name, t in view.live().items() if name.endswith("w13_weight")][:1]
            slices[rank] = [(c.tensor, c.box.start, c.box.shape, c.full) for c in plan.copies]
            sums[rank] = digests
            with worker(config, tp, pp, experts, tp_rank, pp_rank) as made:
                with Allocated() as seen, unallocated(torch.device("cpu"), from_bytes=0):
                    bare = build(made)
                require_parameters_only(bare)
                again = plan_model(wrapped(bare, made), described)
                found["bare"] += [] if (again.copies, again.fills) == (plan.copies, plan.fills) else [rank]
                found["allocated"] += seen.nbytes
                found["whole"] += sum(p.numel() * p.element_size() for p in bare.parameters())
            found["ranks"] += 1
    shares = divide(slices)
    counted = Digest()
    for rank, digests in sums.items():
        skipped = set(shares["skipped"][str(rank)])
        for index, digest in enumerate(digests):
            if index not in skipped and slices[rank][index][0] in shares["verified"]:
                counted += digest
    total = sum((digest_tensor(values[name], name) for name in shares["verified"]), Digest())
    return found | {"verified": len(shares["verified"]), "tensors": len(values), "digest": str(counted) == str(total)}


BIG = TIED | {"intermediate_size": 512}


def load(publisher, folder, kind, **options):
    """A model by the load format ``vime``, and how many bytes of it were ever allocated."""
    from vime_sync.vllm_plugin.loader import VimeModelLoader
    from vllm.config.load import LoadConfig

    path = Path(folder) / f"{kind}.json"
    path.write_text(json.dumps(publisher.manifest()))
    extra = {"weights": kind, "manifest": str(path), **options}
    with worker(BIG, 1, 1, False, 0, 0) as made:
        loader = VimeModelLoader(LoadConfig(load_format="vime", model_loader_extra_config=extra))
        with Allocated() as seen:
            model = loader.load_model(vllm_config=made, model_config=made.model_config)
        return wrapped(model, made), seen.nbytes


def asked(publisher, folder):
    """Where the load format asks for memory. As on a GPU, torch's default device is another one than when it built."""
    from unittest import mock

    from vime_sync.errors import AliasError
    from vime_sync.vllm_plugin import loader as module

    seen = []

    def bind(model, manifest, assign):
        seen.append(str(model.device))
        raise AliasError("that is all")

    with mock.patch.object(module, "bind", bind), contextlib.suppress(AliasError), as_if_elsewhere():
        load(publisher, folder, "alias")
    return seen


@contextlib.contextmanager
def as_if_elsewhere():
    """Weights are loaded with torch's default device set to another one than the model is built on."""
    from unittest import mock

    from vime_sync.vllm_plugin.loader import VimeModelLoader

    inner = VimeModelLoader.load_weights

    def elsewhere(self, model, config):
        with torch.device("meta"):
            inner(self, model, config)

    with mock.patch.object(VimeModelLoader, "load_weights", elsewhere):
        yield


def aliased(folder):
    """The whole load format on a model that is aliased, one that is built with memory, and one that is refused."""
    from vime_sync.publisher import Publisher
    from vime_sync.source import WeightSource

    with worker(BIG, 1, 1, False, 0, 0) as made:
        plain = build(made)
        wrapped(plain, made).load_weights(weights(BIG).items())
        expected = {name: bits(p) for name, p in plain.named_parameters(remove_duplicate=False)}
    publisher = Publisher(laid_out(BIG, padded_words=128))
    fill(publisher.source, BIG, 1)
    publisher.stage(0)
    found = {"whole": sum(b.numel() for b in expected.values()), "large": 0, "same": {}, "loaders": True, "tied": True}
    found["large"] = sum(b.numel() for b in expected.values() if b.numel() >= 1 << 16)
    for name, options in (("frugal", {}), ("allocate", {"allocate": True})):
        view, nbytes = load(publisher, folder, "alias", **options)
        live = dict(view._model.named_parameters(remove_duplicate=False))
        found["same"][name] = all(torch.equal(expected[key], bits(live[key])) for key in expected)
        found["tied"] &= live["lm_head.weight"].data_ptr() == live["model.embed_tokens.weight"].data_ptr()
        found["loaders"] &= all(
            isinstance(live[key], torch.nn.Parameter)
            and type(live[key]) is type(parameter)
            and hasattr(live[key], "weight_loader") == hasattr(parameter, "weight_loader")
            for key, parameter in plain.named_parameters(remove_duplicate=False)
        )
        found[name] = nbytes
        before = live["model.norm.weight"].clone()
        publisher.source.buffers["flat"].mul_(2)
        found["same"][name] &= torch.equal(live["model.norm.weight"], before * 2)
        fill(publisher.source, BIG, 1)
        for lease in view.alias().leases:
            lease.close()
    found["device"] = asked(publisher, folder)
    publisher.close()
    with Publisher(WeightSource.from_tensors(weights(BIG))) as other:
        other.stage(0)
        view, nbytes = load(other, folder, "auto")
        found["auto"] = nbytes
        found["refused"] = view.alias_refused()
        found["bare"] = [name for name, tensor in view.live().items() if tensor.is_meta]
    return found


def plain(dtype):
    """What the step after loading leaves of a model, by vLLM's own load format and by ours; neither reads a file.

    Ours is then written to, as a sync does, and its layers must compute with what was written.
    """
    from vime_sync.vllm_plugin import register
    from vime_sync.vllm_plugin.backend import VllmModel
    from vllm.platforms import current_platform

    register()
    config = BIG | {"dtype": dtype}
    theirs, _ = by_format(config, load_format="dummy")
    ours, made = by_format(config, load_format="vime", model_loader_extra_config={"weights": "dummy"})
    layers = [(name, layer) for name, layer in ours.named_modules() if hasattr(layer, "cpu_linear")]
    view = VllmModel(ours, made, torch.device("cpu"))
    described, buffers = published(weights(config))
    found = {"cpu": current_platform.is_cpu(), "layers": len(layers), "obstacles": view.obstacles()}
    found["theirs"] = [name for name, p in theirs.named_parameters() if p.numel() == 0]
    found["ours"] = [name for name, layer in layers if bare(layer)]
    plan = plan_model(view, described)
    CopyProgram(plan, buffers, {name: view.live()[name] for name in plan.live_names}).run(digest="off", phase=0)
    found["stale"] = [name for name, layer in layers if not computes(layer)]
    return found | {"reload": list(plan.reload)}


def by_format(config, **options):
    """A model and its configuration, loaded and post-processed."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    with worker(config, 1, 1, False, 0, 0) as made:
        loader = get_model_loader(LoadConfig(**options))
        return loader.load_model(vllm_config=made, model_config=made.model_config), made


def bare(layer):
    """Whether a layer's weight is gone, or nothing could be loaded into it any more."""
    return layer.weight.numel() == 0 or not hasattr(layer.weight, "weight_loader")


def computes(layer):
    """Whether a layer multiplies by its weight as it is now."""
    x = torch.randn(3, layer.weight.shape[1], dtype=layer.weight.dtype)
    return torch.equal(layer.quant_method.apply(layer, x), torch.nn.functional.linear(x, layer.weight))


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{folder}/store", local_rank=0, backend="gloo"
        )
        with set_current_vllm_config(configured(DENSE)):
            parallel_state.initialize_model_parallel(1, 1)
        special = {"aliased": lambda: aliased(folder), **{f"plain {d}": lambda d=d: plain(d) for d in DTYPES}}
        for name in sys.argv[1:] or [*CASES, *special]:
            found = special[name]() if name in special else case(*CASES[name])
            print(json.dumps({"case": name} | found), flush=True)


if __name__ == "__main__":
    main()
