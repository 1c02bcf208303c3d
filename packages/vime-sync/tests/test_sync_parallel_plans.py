"""The loaders of real vLLM models under every kind of parallelism, recorded, executed, compared; no engine is started.

One process builds and loads every rank's model on the CPU (`sync_vllm_models`), each test looks at one of its cases.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vime_sync.vllm_plugin.window import missing_in

HERE = Path(__file__).parent
NAMES = (
    "tied",
    "tied tp2",
    "tied pp2",
    "bf16 tp2 pp2",
    "biases tp2 pp2",
    "experts",
    "experts tp2",
    "experts ep2",
    "experts ep4",
    "experts ep2 pp2",
)
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="session")
def cases():
    """What the process found, by case."""
    switches = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "sync_vllm_models.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | switches,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {record["case"]: record for record in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gets_the_bytes_that_its_own_loaders_would_give_it(cases, name):
    found = cases[name]
    assert (found["wrong"], found["reload"]) == ([], [])
    split = [int(word[2:]) for word in name.split() if word[:2] in ("tp", "ep", "pp")]
    assert found["ranks"] == (split[0] if split else 1) * (split[1] if len(split) > 1 else 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_workers_together_vouch_for_every_tensor_once(cases, name):
    """Also for norms and embeddings that several stages hold, and for experts that only one of them does."""
    found = cases[name]
    assert found["verified"] == found["tensors"]
    assert found["digest"]


@pytest.mark.parametrize(("name", "local"), [("experts tp2", 4), ("experts ep2", 2), ("experts ep4", 1)])
def test_expert_parallel_workers_hold_whole_experts(cases, name, local):
    assert cases[name]["experts"] == [local]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_memory_has_the_same_plan(cases, name):
    found = cases[name]
    assert (found["bare"], found["allocated"]) == ([], 0)
    assert found["whole"] > 100_000


def test_an_aliased_model_is_never_allocated(cases):
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    if any(part.path == "BaseModelLoader.create_model" for part in missing_in(vllm)):
        pytest.skip("this vLLM builds and loads a model in one step, so its parameters are there for a moment")
    found = cases["aliased"]
    assert found["same"] == {"frugal": True, "allocate": True}
    assert found["loaders"]
    assert found["tied"]
    assert found["large"] > 0.8 * found["whole"]
    assert found["allocate"] >= found["large"] > 4 * found["frugal"]


def test_memory_is_asked_for_where_the_model_was_built(cases):
    assert cases["aliased"]["device"] == ["cpu"]


def test_a_model_that_cannot_be_aliased_is_allocated_after_all_and_says_why(cases):
    found = cases["aliased"]
    assert "live tensors cannot be aliased" in found["refused"]
    assert found["bare"] == []
    assert found["auto"] >= found["large"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_cpu_build_packs_stays_plain_under_our_load_format(cases, dtype):
    """In every release, also in 0.28, which has no switch for it. vLLM's own load format shows that it packs."""
    found = cases[f"plain {dtype}"]
    if not found["cpu"]:
        pytest.skip("only the CPU build packs linear weights")
    assert {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} == {name.split(".")[-2] for name in found["theirs"]}
    assert (found["ours"], found["obstacles"], found["reload"]) == ([], {}, [])
    assert found["layers"] == len(found["theirs"]) + 2
    assert found["stale"] == []
