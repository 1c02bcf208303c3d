"""The pure parts of the benchmark beside TRL; TRL itself is not installed here and not needed."""

import asyncio
import importlib
import json
from pathlib import Path

import pytest
from vime_grpo import ConfigError, load_config
from vime_integration.translate import data_config
from vime_rollout import Encoder, load_reward, open_data_source

INTEGRATION = Path(__file__).resolve().parents[1]
EXAMPLE = INTEGRATION / "examples/demo_cpu.toml"


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(INTEGRATION / "benchmarks")
        yield importlib.import_module("peer_terms"), importlib.import_module("peer_trl")


def arguments(terms, *overrides, **options):
    config = load_config(EXAMPLE, overrides)
    return terms.translate(config, terms.EngineKind.VLLM, **options).arguments


def test_one_update_takes_all_samples_in_one_accumulation(parts):
    terms, _ = parts
    said = arguments(terms)  # 32 x 8 samples of at most 64 tokens; 4096 tokens a micro-batch
    assert said["per_device_train_batch_size"] == 64
    assert said["gradient_accumulation_steps"] == said["steps_per_generation"] == 4
    assert said["max_steps"] == 20
    assert (said["loss_type"], said["scale_rewards"], said["beta"]) == ("grpo", "group", 0.0)
    assert (said["epsilon"], said["epsilon_high"], said["delta"]) == (0.2, 0.28, None)
    assert (said["temperature"], said["top_k"], said["max_completion_length"]) == (1.0, 0, 6)
    assert not said["bf16"]
    assert not said["vllm_importance_sampling_correction"]


def test_several_updates_share_one_generation(parts):
    terms, _ = parts
    said = arguments(terms, "algorithm.steps_per_rollout=2", micro_batch=32)
    assert said["max_steps"] == 40
    assert said["gradient_accumulation_steps"] == 4
    assert said["steps_per_generation"] == 8


@pytest.mark.parametrize(("aggregation", "loss"), [("token_mean", "dapo"), ("horizon", "dr_grpo")])
def test_the_normalisation_goes_by_another_name(parts, aggregation, loss):
    terms, _ = parts
    assert arguments(terms, f"algorithm.loss_aggregation={aggregation}")["loss_type"] == loss


def test_the_correction_and_the_schedule_are_carried(parts):
    terms, _ = parts
    said = arguments(
        terms,
        "algorithm.correction=mis",
        "algorithm.correction_level=sequence",
        "trainer.lr_schedule=cosine",
        "trainer.min_learning_rate=1e-5",
        "trainer.dtype=bfloat16",
    )
    assert said["vllm_importance_sampling_mode"] == "sequence_mask"
    assert said["vllm_importance_sampling_clip_max"] == 2.0
    assert (said["lr_scheduler_type"], said["lr_scheduler_kwargs"]) == ("cosine_with_min_lr", {"min_lr": 1e-5})
    assert said["bf16"]
    assert said["model_init_kwargs"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.advantage=rloo",
        "algorithm.policy_loss=cispo",
        "algorithm.correction=icepop",
        "algorithm.old_logprobs=rollout",
        "rollout.filter=differing_rewards",
    ],
)
def test_what_would_be_another_algorithm_is_refused(parts, setting):
    terms, _ = parts
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        arguments(terms, setting)


def test_a_micro_batch_must_divide_the_samples(parts):
    terms, _ = parts
    with pytest.raises(ConfigError, match="256 samples"):
        arguments(terms, micro_batch=48)


def test_what_is_not_carried_is_told(parts):
    terms, _ = parts
    config = load_config(EXAMPLE, ["trainer.dtype=bfloat16", "engine.dtype=bfloat16", "evaluation.every=0"])
    told = " ".join(terms.translate(config, terms.EngineKind.VLLM).not_carried)
    for word in ("padded", "autocast", "enforce_eager", "engine.dtype", "difference of logprobs"):
        assert word in told
    assert "evaluated" not in told


def test_rewards_and_prompts_are_ours(parts, tmp_path):
    _, peer = parts
    config = load_config(EXAMPLE, ["rollout.samples_per_prompt=2"])
    encoder = Encoder(config.model.path)
    prompts = open_data_source(data_config(config), encoder).next(3)
    rows = peer.dataset_rows(prompts)
    assert [row["position"] for row in rows] == [0, 1, 2]
    assert [row["prompt"] for row in rows] == [[dict(m) for m in prompt.messages] for prompt in prompts]

    recorder = peer.Recorder({}, tmp_path / "peer.json")
    reward = load_reward("exact_match")
    try:
        function = peer.reward_function(reward, prompts, encoder, config, recorder)
        right = [list(encoder.encode_text(str(prompt.label))) for prompt in prompts]
        recorder.train_begins()
        recorder.step_begins()
        given = [right[0], right[1], right[1], [5] * 6]
        scores = asyncio.run(function(completion_ids=given, position=[0, 0, 1, 1], prompts=[], completions=[]))
        assert scores == [1.0, float(prompts[0].label == prompts[1].label), 1.0, 0.0]
        assert not recorder.step_ends()
    finally:
        reward.close()
    step = recorder.steps[0]
    assert step.samples == 4
    assert step.response_tokens == sum(len(ids) for ids in given)
    assert step.truncated == 1
    assert step.reward == pytest.approx(sum(scores) / 4)
    assert step.step_s == pytest.approx(step.generate_s + step.reward_s + step.train_s)


def test_other_tokens_of_a_prompt_are_refused(parts):
    _, peer = parts
    config = load_config(EXAMPLE)
    prompts = open_data_source(data_config(config), Encoder(config.model.path)).next(2)

    class Tokenizer:
        def apply_chat_template(self, conversation, **_options):
            asked = [prompt for prompt in prompts if [dict(m) for m in prompt.messages] == conversation[0]]
            return {"input_ids": [list(asked[0].tokens) + self.more]}

    tokenizer = Tokenizer()
    tokenizer.more = []
    peer.check_tokens(prompts, tokenizer)
    tokenizer.more = [7]
    with pytest.raises(ConfigError, match=prompts[0].id):
        peer.check_tokens(prompts, tokenizer)


def test_the_report_is_whole_after_every_step(parts, tmp_path):
    _, peer = parts
    recorder = peer.Recorder({"peer": "trl"}, tmp_path / "peer.json", stop_at=1e-9)
    recorder.train_begins()
    for number in range(3):
        recorder.step_begins()
        recorder.scored([], [number / 2, number / 2], began=0.0)
        assert recorder.step_ends()  # the deadline has passed
        recorder.logged({"loss": 0.5, "reward": float("nan"), "name": "x"})
        written = json.loads((tmp_path / "peer.json").read_text())
        assert [step["step"] for step in written["steps"]] == list(range(1, number + 2))
        assert written["steps"][-1]["peer"] == {"loss": 0.5}
    assert written["summary"]["first_reward"] == 0.0
    assert written["summary"]["last_reward"] == 1.0
    assert list(tmp_path.iterdir()) == [tmp_path / "peer.json"]


def test_two_runs_stand_side_by_side(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(INTEGRATION / "benchmarks")
        side = importlib.import_module("peer_beside")
    rows = [
        {
            "perf/step_time": 2.0,
            "perf/rollout_time": 1.0,
            "perf/update_weights_time": 0.25,
            "perf/train_time": 0.5,
            "perf/wake_time": 0.25,
            "rollout/raw_reward": number / 10,
            "rollout/response_len/mean": 3.0,
        }
        for number in range(12)
    ]
    theirs = [
        {
            "wall_s": 4.0 * (number + 1),
            "step_s": 4.0,
            "generate_s": 2.0,
            "reward_s": 0.5,
            "train_s": 1.5,
            "reward": number / 10,
            "samples": 8,
            "response_tokens": 24,
        }
        for number in range(10)
    ]
    result = side.beside(side.our_steps(rows, samples=8), side.peer_steps({"steps": theirs}))
    assert result["common_steps"] == 10
    assert result["step_time_trl_over_ours"] == 2.0
    assert result["ours"]["median"]["rollout_s"] == 1.25
    assert result["ours"]["median"]["memory_s"] == 0.25
    assert result["ours"]["response_tokens_per_s"] == 12.0
    assert result["trl"]["response_tokens_per_s"] == 6.0
    assert result["seconds_to_reward"]["0.7"] == {"ours": 20.0, "trl": 40.0}  # the mean of 0.5 to 0.9
    assert side.seconds_to(side.peer_steps({"steps": theirs}), 0.8) is None
    with pytest.raises(ConfigError, match="1 and 0 steps"):
        side.beside(side.our_steps(rows[:1], samples=8), [])
    theirs[3]["samples"] = 0
    with pytest.raises(ConfigError, match="generated nothing"):
        side.peer_steps({"steps": theirs})
