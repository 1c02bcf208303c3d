"""The engine on real vLLM: one server for all tests here; a test that kills it has the next one restart it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio
from vime_rollout import (
    CpuOptions,
    DataConfig,
    Encoder,
    EngineConfig,
    EnginePool,
    EngineState,
    GenerateRequest,
    Prompt,
    RemoteEngine,
    Rollout,
    RolloutConfig,
    SampleStatus,
    SamplingParams,
    VLLMEngine,
    load_reward,
    open_data_source,
)
from vime_rollout.errors import (
    EngineDeadError,
    EngineRequestError,
    EngineStartError,
    EngineStateError,
    EngineTimeoutError,
    VersionMismatchError,
)
from vime_rollout.experimental import Collector, MultiTurn, PartialSamples

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = (5, 14, 6, 17)
CONTEXT = 256


def config_of(model, folder, **changes):
    options = {"dtype": "float32", "max_model_len": CONTEXT, "enforce_eager": True, "cpu": CpuOptions()}
    options |= {"log_path": str(folder / "engine.log"), "start_deadline_s": 300.0, "name": "e0"}
    return EngineConfig(model=str(model), **{**options, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def holder(tiny_model, tmp_path_factory):
    """The shared engine's slot; what is in it at the end is stopped, and nothing may be left of it."""
    slot = {"config": config_of(tiny_model, tmp_path_factory.mktemp("engine")), "engine": None}
    yield slot
    if slot["engine"] is not None:
        pids = slot["engine"].pids
        await slot["engine"].stop()
        assert not [p for p in pids if psutil.pid_exists(p)]


@pytest_asyncio.fixture(loop_scope="module")
async def engine(holder):
    """A ready engine of version 0 or more."""
    if holder["engine"] is None:
        holder["engine"] = VLLMEngine(holder["config"])
        await holder["engine"].start()
    elif holder["engine"].state is not EngineState.READY:
        await holder["engine"].restart(initial_version=0)
    return holder["engine"]


def request(max_tokens=16, seed=3, tokens=PROMPT, **sampling):
    return GenerateRequest(tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling), seed=seed)


async def relabel(engine, version):
    """Give the weights the next version, as a weight update does when it is committed."""
    await engine._client.control("POST", "/update_weight_version", json={"new_version": str(version)})


async def test_equal_seeds_give_equal_tokens_whatever_else_runs(engine):
    alone = await engine.generate(request(seed=3))
    crowd = await asyncio.gather(*(engine.generate(request(seed=s)) for s in (1, 2, 3, 4, 3)))
    assert crowd[2].tokens == crowd[4].tokens == alone.tokens
    assert len({g.tokens for g in crowd}) == 4
    assert (alone.status, len(alone.tokens), alone.engine) == (SampleStatus.TRUNCATED, 16, "e0")


async def test_samples_of_one_request_are_those_of_requests_for_each_alone(engine):
    asked = GenerateRequest(PROMPT, SamplingParams(max_tokens=64), seed=2**62 - 1)
    together, crowd = await asyncio.gather(engine.generate_many(asked, 6), engine.generate_many(request(64), 5))
    alone = [await engine.generate(asked.alone(index)) for index in range(6)]
    assert [g.tokens for g in together] == [g.tokens for g in alone]
    assert len({g.tokens for g in (*together, *crowd)}) == 11
    assert [(g.status, g.versions) for g in together] == [(g.status, g.versions) for g in alone]
    assert {g.status for g in together} == {SampleStatus.COMPLETED, SampleStatus.TRUNCATED}
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    greedy = await engine.generate_many(request(temperature=0.0), 2)
    assert greedy[0].tokens == greedy[1].tokens


@pytest.mark.parametrize("how", ["by name", "all", "pause"])
async def test_samples_of_one_request_are_cut_together_and_keep_what_they_have(engine, how):
    calm = await engine.generate_many(request(CONTEXT - 8, seed=40), 3)
    for _ in range(10):  # the cut must hit while tokens are made
        named = replace(request(CONTEXT - 8, seed=40), request_id="cut-me")
        running = asyncio.create_task(engine.generate_many(named, 3))
        await asyncio.sleep(0.1)
        if how == "pause":
            await engine.pause("abort")
            await engine.resume()
        else:
            await (engine.abort(["cut-me"]) if how == "by name" else engine.abort_all())
        cut = await running
        if any(g.tokens for g in cut) and all(g.status is SampleStatus.ABORTED for g in cut):
            break
    assert {g.status for g in cut} == {SampleStatus.ABORTED}
    for part, whole in zip(cut, calm, strict=True):
        assert part.tokens == whole.tokens[: len(part.tokens)]
        assert part.logprobs == pytest.approx(whole.logprobs[: len(part.tokens)], abs=1e-5)
    assert [g.tokens for g in await engine.generate_many(request(CONTEXT - 8, seed=40), 3)] == [g.tokens for g in calm]


async def test_more_seeded_prompts_at_once_than_a_batch_holds(engine):
    prompts = [tuple(5 + (i + j) % 40 for j in range(200)) for i in range(60)]
    await engine._client.control(
        "POST", "/pause", params={"mode": "keep"}
    )  # behind the states' back: let them queue up
    tasks = [asyncio.create_task(engine.generate(request(4, seed=i, tokens=p))) for i, p in enumerate(prompts)]
    await asyncio.sleep(1.0)
    await engine._client.control("POST", "/resume")
    answers = await asyncio.gather(*tasks)
    assert all(len(answer.tokens) == 4 for answer in answers)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampled_distribution(engine, tiny_model, temperature):
    import torch
    from transformers import Qwen3ForCausalLM

    generations = await asyncio.gather(
        *(engine.generate(request(48, seed=s, temperature=temperature)) for s in range(4))
    )
    model = Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for generation in generations:
        tokens = torch.tensor([PROMPT + generation.tokens])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(PROMPT) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(PROMPT) :, None])[:, 0]
        difference = (expected - torch.tensor(generation.logprobs)).abs().max().item()
        assert difference < 1e-4
        assert expected.std() > 0.1  # far from uniform, where every answer would be near the right one


async def test_stop_strings_ids_and_end_of_sequence(engine, tiny_model):
    encoder = Encoder(tiny_model)
    free = await engine.generate(request(64, seed=5))
    text = encoder.decode(free.tokens)
    stop = next(c for c in text[3:] if c.isalnum() and c not in text[:3])
    cut = await engine.generate(request(64, seed=5, stop=(stop,)))
    assert cut.status is SampleStatus.COMPLETED
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert encoder.decode(cut.tokens).endswith(stop)
    last = free.tokens[5]
    first = free.tokens.index(last)
    by_id = await engine.generate(request(64, seed=5, stop_token_ids=(last,)))
    assert by_id.tokens == free.tokens[: first + 1]
    ends = [GenerateRequest(PROMPT, SamplingParams(max_tokens=CONTEXT - 4), seed=s) for s in range(8)]
    finished = [g for g in await asyncio.gather(*map(engine.generate, ends)) if g.status is SampleStatus.COMPLETED]
    assert finished
    assert all(g.tokens[-1] == encoder.eos_token_id and encoder.eos_token_id not in g.tokens[:-1] for g in finished)


async def test_versions_are_stamped_checked_and_span_an_update_in_flight(engine):
    before = engine.version
    assert {s.version for s in (await engine.generate(request(), version=before)).versions} == {before}
    with pytest.raises(VersionMismatchError, match=f"version {before + 5}"):
        await engine.generate(request(), version=before + 5)
    for attempt in range(10):  # the update must hit while tokens are made
        running = asyncio.create_task(engine.generate_many(request(CONTEXT - 8, seed=attempt), 2))
        await asyncio.sleep(0.1)
        await engine.pause("keep")
        version = engine.version + 1
        async with engine.updating(version):
            await relabel(engine, version)
            await engine._client.control("POST", "/resume")
        both = [answer.versions for answer in await running]
        if [len(spans) for spans in both] == [2, 2]:
            break
    for spans in both:
        assert [s.version for s in spans] == [version - 1, version]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, CONTEXT - 8)
    assert engine.version == version
    with pytest.raises(VersionMismatchError):
        await engine.generate(request(), version=version - 1)


async def test_a_failed_update_leaves_the_old_version_serving(engine):
    before = engine.version
    with pytest.raises(RuntimeError, match="transfer"):
        async with engine.updating(before + 1):
            raise RuntimeError("transfer failed")
    assert (engine.state, engine.version) == (EngineState.READY, before)
    await engine.generate(request(), version=before)


async def test_pause_holds_requests_and_resume_lets_them_go(engine):
    await engine.pause()
    with pytest.raises(EngineStateError, match="paused -> asleep"):
        await engine.sleep()
    waiting = asyncio.create_task(engine.generate(request()))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).tokens) == 16
    with pytest.raises(EngineStateError, match="cannot resume"):
        await engine.resume()


async def test_a_deadline_frees_the_engine(engine):
    with pytest.raises(EngineTimeoutError, match=r"0\.05 s"):
        await engine.generate(request(CONTEXT - 8), deadline_s=0.05)
    assert engine.in_flight == 0
    await engine.health()
    assert len((await engine.generate(request())).tokens) == 16


async def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(engine):
    with pytest.raises(EngineRequestError, match=rf"length 300.*{CONTEXT}"):
        await engine.generate(request(tokens=(5,) * 300))


async def test_a_remote_engine_is_used_and_never_ended(engine):
    remote = RemoteEngine(engine.url)
    await remote.connect(initial_version=77)  # the server has a version: it is read, not overwritten
    assert remote.version == engine.version
    assert (await remote.generate(request())).tokens == (await engine.generate(request())).tokens
    await remote.stop()
    assert remote.state is EngineState.STOPPED
    await engine.health()


async def test_the_loop_on_the_real_engine_is_repeatable(engine, tiny_model):
    encoder = Encoder(tiny_model)
    data = DataConfig(gym_task="chain_sum", gym_size=8, gym_options={"max_terms": 2}, apply_chat_template=True)
    prompts = open_data_source(data, encoder).next(3)
    reward = load_reward("exact_match")
    config = RolloutConfig(samples_per_prompt=4, sampling=SamplingParams(max_tokens=24), max_context_tokens=CONTEXT)
    rollout = Rollout(EnginePool([engine]), encoder, reward, config)
    first = await rollout.run(prompts, version=engine.version)
    for most in (None, 3, 1):  # in one request, in two, in one each
        again = rollout.with_config(replace(config, samples_per_request=most))
        second = await again.run(prompts, version=engine.version)
        assert [[s.tokens for s in g] for g in first] == [[s.tokens for s in g] for g in second]
    assert all(s.reward is not None and (s.reward or s.reward_reason) for g in first for s in g)
    assert {s.oldest_version for g in first for s in g} == {engine.version}


async def test_a_cut_sample_goes_on_where_it_was_cut(engine, tiny_model):
    data = DataConfig(gym_task="chain_sum", gym_size=2)
    encoder = Encoder(tiny_model)
    (prompt,) = open_data_source(data, encoder).next(1)
    sampling = SamplingParams(max_tokens=128, ignore_eos=True)
    config = RolloutConfig(samples_per_prompt=2, sampling=sampling, max_context_tokens=CONTEXT)
    rollout = Rollout(engine, encoder, load_reward("exact_match"), config)
    for _ in range(10):
        running = asyncio.create_task(rollout.run([prompt]))
        await asyncio.sleep(0.15)
        await engine.abort_all()
        (group,) = await running
        if all(s.timings.attempts > 1 for s in group):
            break
    assert all(s.response_length == 128 and s.status is SampleStatus.TRUNCATED for s in group)
    assert all(s.timings.attempts > 1 for s in group)


async def test_what_a_step_cuts_the_next_one_goes_on_with(engine, tiny_model):
    encoder, reward = Encoder(tiny_model), load_reward("exact_match")
    long = tuple(5 + i % 40 for i in range(CONTEXT - 20))  # leaves room for 20 tokens: it is done first
    prompts = [Prompt(id=f"p:{i}", tokens=long if i == 0 else PROMPT, label="1", position=i) for i in range(3)]
    sampling = SamplingParams(max_tokens=128, ignore_eos=True)
    for seed in range(10):  # the cut must hit while tokens are made
        config = RolloutConfig(samples_per_prompt=2, sampling=sampling, max_context_tokens=CONTEXT, seed=seed)
        before, left = engine.version, iter(prompts)
        calm = await Rollout(engine, encoder, reward, config).run(prompts, version=before)
        rollout = Rollout(EnginePool([engine]), encoder, reward, config, partial=PartialSamples())
        draw = lambda n, left=left: [next(left) for _ in range(n)]  # noqa: E731
        collector = Collector(rollout, draw, ahead=2, keep=lambda group: "")
        first = await collector.step(1, version=before)
        assert [[s.tokens for s in g] for g in first.groups] == [[s.tokens for s in g] for g in calm[:1]]
        assert engine.in_flight == 0
        async with engine.updating(before + 1):
            await relabel(engine, before + 1)
        rollout = Rollout(engine, encoder, reward, config, partial=PartialSamples())
        resumed = Collector(rollout, lambda n: [], keep=lambda group: "")
        resumed.load_state_dict(json.loads(json.dumps(collector.state_dict())))
        second = await resumed.step(2, version=before + 1)
        for sample, whole in zip([s for g in second.groups for s in g], [s for g in calm[1:] for s in g], strict=True):
            assert sample.response_length == 128
            kept = sum(span.end - span.start for span in sample.versions if span.version == before)
            assert sample.tokens[: sample.prompt_length + kept] == whole.tokens[: whole.prompt_length + kept]
            assert sample.logprobs[:kept] == pytest.approx(whole.logprobs[:kept], abs=1e-4)
        if rollout.partial.counts.continued:
            break
    assert rollout.partial.counts.continued


class Nods:
    """Answers three turns."""

    def __init__(self, prompt):
        self.left = 3

    async def reply(self, turn):
        self.left -= 1
        return [{"role": "user", "content": "and?"}] if self.left else []


async def test_turns_with_a_real_engine(engine, tiny_model):
    encoder, version = Encoder(tiny_model), engine.version
    prompt = Prompt(id="p:0", messages=({"role": "user", "content": "1+1="},), label="2")
    sampling = SamplingParams(max_tokens=32, stop=tuple("aeiou123456"), ignore_eos=True)
    config = RolloutConfig(samples_per_prompt=4, sampling=sampling, max_context_tokens=CONTEXT, max_turns=3)
    generate = MultiTurn(Nods)
    rollout = Rollout(engine, encoder, load_reward("exact_match"), config, generate=generate)
    groups = [await rollout.run([prompt], version=version) for _ in range(2)]
    assert [[s.tokens for s in g] for g in groups[0]] == [[s.tokens for s in g] for g in groups[1]]
    samples = groups[0][0].samples
    assert any(s.metadata["turns"] > 1 for s in samples)
    for sample in samples:  # the engine agrees about every token that is trained on, in its context
        sampled = [i for i, flag in enumerate(sample.loss_mask) if flag]
        assert {v for span in sample.versions for v in [span.version]} == {version}
        assert sum(span.end - span.start for span in sample.versions) == len(sampled)
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for sample in samples:
        tokens = torch.tensor([sample.tokens])
        with torch.no_grad():
            logits = model(tokens).logits[0, sample.prompt_length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[0, sample.prompt_length :, None])[:, 0]
        difference = (expected - torch.tensor(sample.logprobs)) * torch.tensor(sample.loss_mask)
        assert difference.abs().max().item() < 1e-4


async def test_a_hung_core_answers_health_but_no_probe(engine):
    (core,) = [p for p in engine.pids if "EngineCore" in _line(p)]
    os.kill(core, signal.SIGSTOP)
    try:
        await engine.health()
        with pytest.raises(EngineTimeoutError):
            await engine.probe(deadline_s=1.0)
        with pytest.raises(EngineTimeoutError):
            await engine.generate(request(), deadline_s=0.5)
    finally:
        os.kill(core, signal.SIGCONT)
    await engine.probe()


@pytest.mark.parametrize("victim", ["VLLM::EngineCore", "api_server"])
async def test_a_killed_engine_is_told_with_its_log(engine, victim):
    pids, scratch = engine.pids, engine._process.scratch
    assert any(path.is_socket() for path in scratch.iterdir())  # that is where vLLM puts what it would leave
    running = asyncio.create_task(engine.generate(request(CONTEXT - 8)))
    await asyncio.sleep(0.1)
    (target,) = [p for p in pids if victim in _line(p) and "warden" not in _line(p)]
    os.kill(target, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="exit code") as caught:
        await running
    assert time.monotonic() - began < 20
    assert "last lines of" in caught.value.seen
    assert engine.state is EngineState.DEAD
    with pytest.raises(EngineDeadError):
        await engine.generate(request())
    with pytest.raises(EngineDeadError):
        await engine.health()
    assert _living(pids) == []
    assert not scratch.exists()


async def test_a_hung_engine_is_restarted_under_a_rollout_that_does_not_notice(engine, tiny_model):
    encoder, reward, version = Encoder(tiny_model), load_reward("exact_match"), engine.version
    prompts = open_data_source(DataConfig(gym_task="chain_sum", gym_size=4), encoder).next(3)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    config = RolloutConfig(samples_per_prompt=2, sampling=sampling, max_context_tokens=CONTEXT)
    calm = await Rollout(engine, encoder, reward, config).run(prompts, version=version)

    remote = RemoteEngine(engine.url, name="remote")
    await remote.connect()
    pool = EnginePool([remote], on_loss="wait")
    before, pids = engine.url, engine.pids
    (core,) = [p for p in pids if "EngineCore" in _line(p)]
    os.kill(core, signal.SIGSTOP)
    running = asyncio.create_task(Rollout(pool, encoder, reward, config).run(prompts, version=version))
    while pool.in_flight < 6:
        await asyncio.sleep(0.01)
    await pool.lose("remote", EngineTimeoutError("engine hangs"))
    await engine.restart()
    assert _living(pids) == []
    assert engine.url != before
    assert engine.version == -1
    with pytest.raises(VersionMismatchError, match="version -1"):
        await remote.reconnect(engine.url, version=version)
    async with engine.updating(version):
        await relabel(engine, version)
    await remote.reconnect(engine.url, version=version)
    assert not running.done()
    pool.readmit("remote")
    restarted = await running
    assert [[s.tokens for s in g] for g in restarted] == [[s.tokens for s in g] for g in calm]
    assert {s.oldest_version for g in restarted for s in g} == {version}
    await remote.stop()


def _line(pid):
    """Return a process's command line, or nothing where it has ended meanwhile."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def _living(pids):
    """Return those that run; one may end between two looks."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.Error:
            continue
    return found


async def test_an_engine_that_cannot_start_says_why(tiny_model, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    values = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(values | {"architectures": ["NoSuchModelForCausalLM"]}))
    engine = VLLMEngine(config_of(broken, tmp_path))
    with pytest.raises(EngineStartError, match="NoSuchModelForCausalLM") as caught:
        await engine.start()
    assert "died while starting" in caught.value.what
    assert engine.state is EngineState.DEAD
    assert engine.pids == []


async def test_a_busy_port_a_missing_model_and_a_deadline_stop_a_start(tiny_model, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        busy = VLLMEngine(config_of(tiny_model, tmp_path, port=holder.getsockname()[1]))
        with pytest.raises(EngineStartError, match="port is busy"):
            await busy.start()
    missing = VLLMEngine(config_of(tmp_path / "none", tmp_path))
    with pytest.raises(EngineStartError, match="missing"):
        await missing.start()
    late = VLLMEngine(config_of(tiny_model, tmp_path, start_deadline_s=1.0))
    starting = asyncio.create_task(late.start())
    while not late.pids:
        await asyncio.sleep(0.01)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):  # it is not listened on yet
        stranger.bind(("127.0.0.1", int(late.url.rpartition(":")[2])))
    with pytest.raises(EngineStartError, match="did not start in time"):
        await starting
    assert busy.pids == missing.pids == late.pids == []
