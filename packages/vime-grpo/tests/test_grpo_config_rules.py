"""Rules between settings, and between settings and the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vime_grpo.config import load_config
from vime_grpo.errors import ConfigError

EVALUATION = [
    "evaluation.every=5",
    "evaluation.kind=reasoning_gym",
    "evaluation.task=chain_sum",
    "evaluation.size=50",
]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["algorithm.steps_per_rollout=3"],
            r"rollout.batch_size \(8\) is not a multiple of algorithm.steps_per_rollout",
        ),
        (
            ["trainer.data_parallel=3"],
            r"32 samples of an optimiser step .* not a multiple of trainer.data_parallel \(3\)",
        ),
        (["engine.max_model_len=64"], r"engine.max_model_len \(64\) is below rollout.max_context_tokens \(128\)"),
        (["trainer.max_tokens_per_microbatch=100"], r"max_tokens_per_microbatch \(100\) is below"),
        (["rollout.max_response_tokens=128"], r"leaves no room for a prompt"),
        (["rollout.samples_per_prompt=1"], r"need at least 2 samples"),
        (["rollout.top_k=0"], r"use -1 for all tokens"),
        (["rollout.top_p=0.9", "rollout.top_k=5"], r"rollout.top_p and rollout.top_k cut the sampled distribution"),
        (["trainer.min_learning_rate=1"], r"min_learning_rate \(1.0\) is above trainer.learning_rate"),
        (["trainer.lr_schedule=cosine", "trainer.warmup_steps=3"], r"leaves nothing of the run's 3 optimiser steps"),
        (["trainer.loss_scale=8"], r'loss_scale is 8 and trainer.dtype = "bfloat16" is not scaled'),
        (["trainer.loss_scale_window=5"], r'loss_scale_window is 5 and trainer.dtype = "bfloat16" is not scaled'),
        (["trainer.dtype=float16", "trainer.loss_scale=100"], r"loss_scale is 100; it must be a power of two"),
        (["trainer.dtype=float16", "trainer.loss_scale=0.5"], r"loss_scale is 0.5; .* at least 1"),
        (
            ["trainer.dtype=float16", "trainer.loss_scale=8", "trainer.loss_scale_window=5"],
            r'loss_scale_window is 5 .* fixed at 8: only "dynamic" grows',
        ),
        (["trainer.distributed_optimizer=true"], r"trainer.data_parallel and trainer.context_parallel are 1"),
        (["algorithm.clip_low=1"], r"must be below 1"),
        (["algorithm.clip_dual=0.5"], r"must be above 1, or 0"),
        (["algorithm.clip_dual=3", "algorithm.policy_loss=cispo"], r"clip_dual needs"),
        (["algorithm.correction_low=2"], r"correction_low \(2.0\) must be below"),
        (["algorithm.correction=mis", "algorithm.correction_low=0.5"], r'"mis" has no lower bound .* "icepop" drops'),
        (["algorithm.correction_low=0.5"], r'"none" has no lower bound'),
        (["algorithm.correction_high=5"], r'"none" has no upper bound and algorithm.correction_high is 5.0'),
        (["algorithm.correction=decoupled", "algorithm.correction_high=5"], r'"decoupled" has no upper bound'),
        (["algorithm.correction=mis", "algorithm.correction_high=0.5"], r"must have 1 between them"),
        (["algorithm.correction=icepop", "algorithm.correction_low=1.5"], r"must have 1 between them"),
        (["algorithm.correction_level=sequence"], r'correction is "none"'),
        (["algorithm.correction=tis", "algorithm.old_logprobs=rollout"], r'needs algorithm.old_logprobs = "recompute"'),
        (["data.apply_chat_template=false", "data.system_prompt=x"], r"data.system_prompt needs"),
        (["data.kind=jsonl"], r"kind 'jsonl' needs data.path"),
        (["data.path=x"], r"kind 'reasoning_gym' does not use data.path"),
        (["reward.path=a.b:c"], r"exactly one of reward.name and reward.path"),
        (["data.kind=custom"], r"kind 'custom' needs data.source"),
        (
            ["data.kind=custom", "data.source=a.b:C"],
            r"kind 'custom' does not use data.task and data.size and data.task_",
        ),
        (["sync.mode=alias", "sync.transport=disk"], r'trainer\'s memory, which sync.transport = "disk" does not map'),
        (["data.options.x=1"], r"kind 'reasoning_gym' does not use data.options"),
        (["data.source=a/b.py"], r"data.source\); seen: 'a/b.py'; expected: .*match pattern"),
        (["rollout.filter=differing"], r"neither \"differing_rewards\" nor a dotted path"),
        (["rollout.filter=differing_rewards", "rollout.filter_options.x=1"], r"filter is 'differing_rewards'"),
        (["rollout.generate_options.x=1"], r"there is none"),
        (["engine.urls=['http://a:1']"], r"names 1 engines .* asks for 1 to be started; set engine.count = 0"),
        (["engine.count=0"], r"engine.urls names none"),
        (["engine.count=0", "engine.urls=['a:8000']"], r"expected http://host:port"),
        (["engine.count=0", "engine.urls=['http://a/v1']"], r"holds 'http://a/v1'"),
        (["engine.count=0", "engine.urls=['http://a', 'http://a']"], r"names an engine twice"),
        (["engine.extra_args=['--dtype', 'float16']"], r"holds --dtype, which engine.dtype stands for"),
        (["engine.extra_args=['--max_model_len=64', '-tp', '2']"], r"engine.max_model_len .* engine.tensor_parallel"),
        (["engine.extra_args=['--kv-cache-memory-bytes', '9']"], r"which engine.kv_cache_gib stands for"),
        (["engine.extra_args=['--logprobs-mode=raw_logprobs']"], r"--logprobs-mode, which the run chooses"),
        (["engine.extra_args=['--hf-overrides', '[1]']"], r"no JSON object \(expected an object\)"),
        (["engine.extra_args=['--hf-overrides']"], r"--hf-overrides whose value is no JSON object"),
        (["trainer.sequence_parallel=true"], r"trainer.tensor_parallel is 1"),
        (["trainer.expert_parallel=2"], r"expert_parallel \(2\) does not divide .* \(1\)"),
        (["pipeline.queue_groups=7"], r"queue_groups \(7\) is below rollout.batch_size \(8\)"),
        (["pipeline.mode=async", "rollout.partial=true"], r"rollout.partial belong to a loop .* step by step"),
        (["pipeline.mode=async", "trainer.offload=on"], r"trainer.offload = \"on\" belongs to a loop .* take turns"),
        (["pipeline.pools=shared"], r"pipeline.pools belongs to pipeline.mode"),
        (["evaluation.every=5", "evaluation.kind=custom"], r"'custom' needs evaluation.source and evaluation.size"),
        (["evaluation.every=5"], r"kind 'jsonl' needs evaluation.path"),
        ([*EVALUATION, "evaluation.pass_k=[1, 4]"], r"pass@4, which needs as many .*samples_per_prompt is 1"),
        ([*EVALUATION, "evaluation.pass_k=[1, 1]"], r"names a k twice"),
        ([*EVALUATION, "evaluation.pass_k=[]"], r"evaluation.pass_k\).*at least 1 item"),
        ([*EVALUATION, "evaluation.samples_per_prompt=4"], r"temperature is 0, so the 4 samples .* the same"),
        (["tracking.wandb=true"], r"needs tracking.wandb_project"),
        (["guards.zero_rewards_action=halt"], r"guards.zero_rewards_action\); seen: 'halt'"),
        (["guards.logprob_difference=0"], r"greater than 0"),
    ],
)
def test_contradictions_are_explained(run_toml: Path, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(run_toml, overrides)


ROPE, WIDE = '{"rope_theta": 1e6}', '{"head_dtype": "float32"}'


@pytest.mark.parametrize(
    ("head", "dtype", "arguments", "fits"),
    [
        ("float32", "bfloat16", ["--hf-overrides", ROPE], False),
        ("float32", "bfloat16", [f"--hf_overrides={ROPE}"], False),
        ("float32", "bfloat16", ["--hf-overrides", WIDE, "--hf-overrides", ROPE], False),
        ("float32", "bfloat16", ["--hf-overrides", WIDE, "--hf-overrides.rope_theta", "1e6"], False),
        ("float32", "bfloat16", ["--hf-overrides", '{"head_dtype": "bfloat16"}'], False),
        ("float32", "bfloat16", ["--hf-overrides", ROPE, "--hf-overrides", WIDE], True),
        ("float32", "bfloat16", ["--hf-overrides.head_dtype=float32", "--hf-overrides", ROPE], True),
        ("float32", "bfloat16", ["--max-num-seqs", "64"], True),
        ("float32", "float32", ["--hf-overrides", ROPE], True),
        ("float32", "float32", ["--hf-overrides", '{"head_dtype": "model"}'], True),
        ("model", "bfloat16", ["--hf-overrides", ROPE], True),
        ("model", "bfloat16", ["--hf-overrides", '{"head_dtype": "bfloat16"}'], True),
        ("model", "bfloat16", ["--hf-overrides", WIDE], False),
    ],
)
def test_overrides_of_the_users_keep_the_type_of_the_logits(
    run_toml: Path, head: str, dtype: str, arguments: list[str], fits: bool
) -> None:
    quoted = ", ".join(f"'{argument}'" for argument in arguments)
    overrides = [f"model.head_dtype={head}", f"engine.dtype={dtype}", f"engine.extra_args=[{quoted}]"]
    if fits:
        assert load_config(run_toml, overrides).engine.extra_args == tuple(arguments)
        return
    with pytest.raises(ConfigError, match=rf'model.head_dtype asks .* add "head_dtype": "{head}" to them'):
        load_config(run_toml, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.top_p=0.9", "guards.logprob_difference_action=warn"],
        ["trainer.sequence_parallel=true", "trainer.tensor_parallel=2", "trainer.pipeline_parallel=3"],
        ["trainer.context_parallel=2", "trainer.data_parallel=4", "trainer.activation_recompute=selective"],
        ["engine.count=0", "engine.urls=['http://a:8000', 'https://b']", "engine.router=true"],
        ["rollout.filter=differing_rewards", "rollout.over_sample=3", "rollout.partial=true"],
        [
            "rollout.filter=my.filters:long_enough",
            "rollout.filter_options.least=4",
            "rollout.generate=my.agents:play",
            "rollout.max_turns=4",
        ],
        ["evaluation.pass_k=[4]"],  # off, so nothing about it has to be right
        [*EVALUATION, "evaluation.samples_per_prompt=8", "evaluation.pass_k=[1, 8]", "evaluation.temperature=0.6"],
        ["evaluation.at_start=true", "evaluation.kind=custom", "evaluation.source=my.data:Held", "evaluation.size=9"],
        ["tracking.wandb=true", "tracking.wandb_project=p"],
        ["pipeline.mode=async", "pipeline.max_weight_lag=0", "pipeline.queue_groups=8"],
        ["trainer.data_parallel=2", "trainer.distributed_optimizer=true", "trainer.tensor_parallel=2"],
        ["trainer.context_parallel=4", "trainer.distributed_optimizer=true"],
        ["algorithm.correction=tis", "algorithm.correction_high=1"],
        ["algorithm.correction=icepop", "algorithm.correction_low=0.5", "algorithm.correction_high=5"],
        ["algorithm.steps_per_rollout=4", "algorithm.kl_coef=0.1", "algorithm.clip_dual=3"],
        ["engine.tensor_parallel=4"],  # vLLM gives each of 2 key-value heads to 2 ranks
    ],
)
def test_what_fits_is_accepted(run_toml: Path, overrides: list[str]) -> None:
    assert load_config(run_toml, overrides).needs_reference == ("algorithm.kl_coef=0.1" in overrides)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["trainer.tensor_parallel=3"], r"trainer.tensor_parallel \(3\) does not divide the model's 4 attention heads"),
        (["trainer.tensor_parallel=4"], r"trainer.tensor_parallel \(4\) does not divide the model's 2 key-value heads"),
        (["engine.tensor_parallel=3"], r"engine.tensor_parallel \(3\) .*intermediate_size 64"),
        (["engine.max_model_len=1024"], r"above the model's max_position_embeddings \(512\)"),
        (["trainer.pipeline_parallel=2"], r"trainer.pipeline_parallel \(2\) does not divide the model's 3 layers"),
        (["trainer.context_parallel=3"], r"context_parallel \(3\) does not suit the 4 attention heads and 2 key-value"),
        (
            ["trainer.context_parallel=4", "trainer.tensor_parallel=2"],
            r"does not suit the 2 attention heads and 1 key-value heads that trainer.tensor_parallel \(2\) leaves",
        ),
        (
            ["trainer.expert_parallel=2", "trainer.data_parallel=2"],
            r"expert_parallel is 2, and the model has no experts",
        ),
    ],
)
def test_layout_must_fit_the_model(run_toml: Path, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(run_toml, overrides)
    assert load_config(run_toml, overrides, check_files=False)


def test_a_model_without_grouped_heads_is_checked_by_its_heads(run_toml: Path) -> None:
    file = run_toml.parent / "model" / "config.json"
    facts = json.loads(file.read_text())
    del facts["num_key_value_heads"]
    file.write_text(json.dumps(facts))
    assert load_config(run_toml, ["trainer.tensor_parallel=4"]).trainer.tensor_parallel == 4


def test_the_width_of_experts_is_theirs(run_toml: Path) -> None:
    file = run_toml.parent / "model" / "config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"num_experts": 4, "intermediate_size": 33, "moe_intermediate_size": 64}))
    assert load_config(run_toml, ["trainer.tensor_parallel=2"]).trainer.tensor_parallel == 2
    file.write_text(json.dumps(facts | {"num_experts": 4, "intermediate_size": 64, "moe_intermediate_size": 33}))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel \(2\) does not divide the model's moe_intermediate_size 33"
    ):
        load_config(run_toml, ["trainer.tensor_parallel=2"])


def test_experts_must_divide(run_toml: Path) -> None:
    file = run_toml.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 6}))
    with pytest.raises(ConfigError, match=r"expert_parallel \(4\) does not divide the model's 6 experts"):
        load_config(run_toml, ["trainer.expert_parallel=4", "trainer.data_parallel=4"])
    config = load_config(
        run_toml, ["trainer.expert_parallel=2", "trainer.data_parallel=4", "trainer.pipeline_parallel=3"]
    )
    assert config.trainer.world_size == 12  # experts take their ranks from the data-parallel ones


def test_sizes_that_follow_from_others(run_toml: Path) -> None:
    config = load_config(run_toml, ["pipeline.max_weight_lag=3"])
    assert config.queue_groups == 32
    assert load_config(run_toml, ["pipeline.queue_groups=9"]).queue_groups == 9
    assert (config.engine.servers, config.evaluation.enabled) == (1, False)
    foreign = load_config(run_toml, ["engine.count=0", "engine.urls=['http://a:1', 'http://b:1']"])
    assert (foreign.engine.servers, foreign.rollout_devices) == (2, 0)


def test_a_folder_that_is_no_model_is_named(run_toml: Path, tmp_path: Path) -> None:
    file = run_toml.parent / "model" / "config.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="names no model_type"):
        load_config(run_toml)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read \(model.path"):
        load_config(run_toml)
    file.rename(file.with_name("other.json"))
    with pytest.raises(ConfigError, match=r"not a model folder.*seen: other.json; expected: config.json"):
        load_config(run_toml)
    with pytest.raises(ConfigError, match=r"model folder does not exist \(model.path = .*/nowhere\)"):
        load_config(run_toml, [f"model.path={tmp_path}/nowhere"])


def test_a_data_file_that_is_not_there_is_named(run_toml: Path) -> None:
    text = run_toml.read_text().replace(
        'kind = "reasoning_gym"\ntask = "chain_sum"\nsize = 100\n', 'path = "p.jsonl"\n'
    )
    run_toml.write_text(text.replace("task_config = { max_terms = 2 }\n", ""))
    with pytest.raises(
        ConfigError, match=r"the data file does not exist \(.*run.toml, data.path\); seen: .*project/p.jsonl"
    ):
        load_config(run_toml)
    (run_toml.parent / "p.jsonl").write_text('{"prompt": "1 + 1"}\n')
    with pytest.raises(ConfigError, match=r"does not exist \(.*run.toml, evaluation.path\); seen: .*held.jsonl"):
        load_config(run_toml, ["evaluation.path=held.jsonl", "evaluation.every=1"])
    assert load_config(run_toml, ["evaluation.path=held.jsonl"]).evaluation.every == 0
    assert load_config(run_toml).data.path == run_toml.parent / "p.jsonl"
