"""Data sources: readers with exact errors, and a walk that is seeded, endless and resumable."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_rollout import DataConfig, Encoder, EpochSource, Prompt, RowKeys, open_data_source
from vime_rollout.errors import DataError, StateError


class Numbers:
    """n prompts in memory."""

    def __init__(self, n: int, name: str = "numbers") -> None:
        self.name, self.n = name, n
        self.fingerprint = f"{name}-{n}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Prompt:
        return Prompt(id=f"{self.name}:{row}", text=str(row))


def write_jsonl(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_jsonl_reads_strings_and_chats(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write_jsonl(
        tmp_path / "d.jsonl",
        {"q": "1+1=", "a": 2, "m": {"level": 1}},
        "\n",
        {"q": chat, "a": "x", "id": "named"},
    )
    keys = RowKeys(prompt="q", label="a", metadata="m")
    first, second = open_data_source(DataConfig(path=str(path), keys=keys, shuffle=False)).next(2)
    assert (first.id, first.text, first.label, first.metadata) == ("d:0", "1+1=", "2", {"level": 1})
    assert (second.id, second.messages, second.label) == ("d:named", tuple(chat), "x")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{broken\n", "broken JSONL line"),
        ("[1]\n", "no object"),
        ('{"other": 1}\n', "no 'prompt'"),
        ('{"prompt": ""}\n', "empty"),
        ('{"prompt": 7}\n', "no prompt"),
        ('{"prompt": [{"content": "x"}]}\n', "no chat message"),
        ('{"prompt": "x", "metadata": [1]}\n', "no mapping"),
    ],
)
def test_broken_line_is_named_with_file_and_line(tmp_path, line, what):
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "ok"}, "\n", line)
    with pytest.raises(DataError, match=what) as caught:
        open_data_source(DataConfig(path=str(path)))
    assert caught.value.where == f"{path}:3"


def test_empty_missing_and_unknown_files_are_errors(tmp_path):
    with pytest.raises(DataError, match="empty"):
        open_data_source(DataConfig(path=str(write_jsonl(tmp_path / "d.jsonl", "\n"))))
    with pytest.raises(DataError, match="cannot be read"):
        open_data_source(DataConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match="unknown kind"):
        open_data_source(DataConfig(path=str(tmp_path / "d.csv")))
    with pytest.raises(DataError, match="exactly one"):
        open_data_source(DataConfig())
    with pytest.raises(DataError, match="empty"):
        EpochSource(Numbers(0))


def test_parquet_reads_what_jsonl_reads(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "label": "1", "metadata": {"a": 1}, "unused": 0},
        {"prompt": [{"role": "user", "content": "r"}], "label": "2", "metadata": {"a": 2}, "unused": 0},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    write_jsonl(tmp_path / "d.jsonl", *rows)
    parquet = open_data_source(DataConfig(path=str(tmp_path / "d.parquet"), shuffle=False)).next(2)
    assert parquet == open_data_source(DataConfig(path=str(tmp_path / "d.jsonl"), shuffle=False)).next(2)


def test_bad_parquet_is_an_error(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read"):
        open_data_source(DataConfig(path=str(tmp_path / "bad.parquet")))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match="no column 'prompt'") as caught:
        open_data_source(DataConfig(path=str(tmp_path / "d.parquet")))
    assert "x" in caught.value.seen
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="empty"):
        open_data_source(DataConfig(path=str(tmp_path / "e.parquet")))


@given(n=st.integers(1, 12), seed=st.integers(0, 5), takes=st.lists(st.integers(0, 30), max_size=6))
@settings(max_examples=40)
def test_each_epoch_visits_every_row_once_and_takes_are_complete(n, seed, takes):
    source = EpochSource(Numbers(n), seed=seed)
    prompts = [p for take in takes for p in source.next(take)]
    assert len(prompts) == sum(takes)
    assert [p.position for p in prompts] == list(range(len(prompts)))
    for start in range(0, len(prompts) - n + 1, n):
        epoch = prompts[start : start + n]
        assert {p.epoch for p in epoch} == {start // n}
        assert Counter(p.id for p in epoch) == Counter(f"numbers:{i}" for i in range(n))


@given(n=st.integers(1, 9), seed=st.integers(0, 3), before=st.integers(0, 25), after=st.integers(1, 25))
@settings(max_examples=40)
def test_a_restored_source_continues_exactly(n, seed, before, after):
    source = EpochSource(Numbers(n), seed=seed)
    source.next(before)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.next(after)
    resumed = EpochSource(Numbers(n), seed=seed)
    resumed.load_state_dict(state)
    assert resumed.next(after) == expected


def test_epochs_and_seeds_differ_but_file_order_does_not():
    def order(**options):
        return [p.text for p in EpochSource(Numbers(50), **options).next(100)]

    shuffled = order(seed=1)
    assert shuffled[:50] != shuffled[50:]
    assert shuffled != order(seed=2)
    assert shuffled == order(seed=1)
    assert order(shuffle=False) == [str(i) for i in range(50)] * 2


@pytest.mark.parametrize(
    "other", [EpochSource(Numbers(4)), EpochSource(Numbers(3), seed=1), EpochSource(Numbers(3, "x"))]
)
def test_a_position_in_other_data_is_refused(other):
    with pytest.raises(StateError, match="another data source"):
        other.load_state_dict(EpochSource(Numbers(3)).state_dict())


def test_prompts_are_encoded_by_the_model_s_own_tokenizer(tokenizer_folder, tmp_path):
    encoder = Encoder(tokenizer_folder)
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "1+1="})
    (plain,) = open_data_source(DataConfig(path=str(path)), encoder).next(1)
    assert encoder.decode(plain.tokens) == "1+1="
    chat_config = DataConfig(path=str(path), apply_chat_template=True, system_prompt="add")
    (chat,) = open_data_source(chat_config, encoder).next(1)
    assert encoder.decode(chat.tokens) == "<system>add\n<user>1+1=\n<assistant>"
    assert encoder.encode(chat) is chat
    assert encoder.eos_token_id == 1
    with pytest.raises(DataError, match="needs apply_chat_template"):
        open_data_source(DataConfig(path=str(path), system_prompt="add"), encoder)


def test_overlong_prompts_are_named_or_dropped_and_counted(tokenizer_folder, tmp_path):
    encoder = Encoder(tokenizer_folder)
    path = write_jsonl(tmp_path / "d.jsonl", {"prompt": "1" * 9}, {"prompt": "12"}, {"prompt": "2" * 8})
    strict = open_data_source(DataConfig(path=str(path), shuffle=False, max_prompt_tokens=7), encoder)
    with pytest.raises(DataError, match="longer") as caught:
        strict.next(1)
    assert (caught.value.where, caught.value.seen) == ("prompt d:0", "9 tokens")
    lenient = DataConfig(path=str(path), shuffle=False, max_prompt_tokens=7, overlong="drop")
    source = open_data_source(lenient, encoder)
    assert [p.text for p in source.next(2)] == ["12", "12"]
    assert source.dropped == 3
    resumed = open_data_source(lenient, encoder)
    resumed.load_state_dict(source.state_dict())
    assert (resumed.next(1), resumed.dropped) == (source.next(1), 5)
    none_fits = DataConfig(path=str(path), max_prompt_tokens=1, overlong="drop")
    with pytest.raises(DataError, match="every prompt"):
        open_data_source(none_fits, encoder).next(1)
    with pytest.raises(DataError, match="needs an encoder"):
        open_data_source(lenient)


def test_tokenizer_failures_are_data_errors(tmp_path, tokenizer_folder):
    with pytest.raises(DataError, match="no tokenizer"):
        Encoder(tmp_path)
    encoder = Encoder(tokenizer_folder)
    encoder._tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        encoder.encode(Prompt(id="a", messages=({"role": "user", "content": "x"},)))
    encoder._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="refuses") as caught:
        encoder.encode(Prompt(id="a", messages=({"role": "user", "content": "x"},)))
    assert "roles must alternate" in caught.value.seen


def test_gym_task_is_made_from_its_recipe():
    config = DataConfig(gym_task="chain_sum", gym_seed=3, gym_size=5, gym_options={"max_terms": 2}, shuffle=False)
    prompts = open_data_source(config).next(5)
    assert prompts == open_data_source(config).next(5)
    assert prompts[2].metadata["gym"] == {
        "task": "chain_sum", "seed": 3, "size": 5, "options": {"max_terms": 2}, "index": 2
    }  # fmt: skip
    assert prompts[0].label is not None
    with pytest.raises(DataError, match="refuses the task"):
        open_data_source(DataConfig(gym_task="no_such_task"))
    with pytest.raises(DataError, match="refuses the task"):
        open_data_source(DataConfig(gym_task="chain_sum", gym_options={"min_terms": 9, "max_terms": 2}))
