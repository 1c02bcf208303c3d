"""Several turns: ids only grow, every trained token is where it was sampled, and what a template changes is forked.

The engine is in memory and writes what a script says; ``test_rollout_real_engine.py`` plays turns with a real one.
"""

from __future__ import annotations

import asyncio
import random
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vime_rollout import (
    Encoder,
    Prompt,
    Rollout,
    RolloutConfig,
    SampleStatus,
    SamplingParams,
    load_generate,
    load_reward,
)
from vime_rollout.errors import EngineError, ExtensionError, RolloutError
from vime_rollout.experimental import (
    MultiTurn,
    ToolCall,
    ToolEnvironment,
    Turn,
    calculator,
    json_tool_calls,
)
from vime_rollout.testing import ScriptedEngine, check_generate

THIS = "turns_for_tests"
HEAD = "{% for m in messages %}<{{ m['role'] }}>"
TAIL = "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
#: Keeps all that was said; marks the end of a turn, as the policy does.
KEEPS = HEAD + "{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}" + TAIL
#: Drops what an assistant thought before the last "/", as templates of reasoning models do with past turns.
DROPS = HEAD + "{{ m['content'].split('/')[-1] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}" + TAIL


def encoder_of(folder, template):
    encoder = Encoder(folder)
    encoder._tokenizer.chat_template = template
    return encoder


@pytest.fixture(scope="module")
def keeps(tokenizer_folder):
    return encoder_of(tokenizer_folder, KEEPS)


@pytest.fixture(scope="module")
def drops(tokenizer_folder):
    return encoder_of(tokenizer_folder, DROPS)


class Countdown:
    """Answers each turn with its number, until there were enough."""

    def __init__(self, prompt):
        self.left = int(prompt.metadata.get("turns", 2))
        self.metadata = {"heard": []}

    async def reply(self, turn):
        self.metadata["heard"].append(turn.text)
        self.left -= 1
        return [{"role": "user", "content": f"more {turn.number}"}] if self.left else []


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Make this module importable under a dotted path, as a user's would be."""
    monkeypatch.setitem(sys.modules, THIS, sys.modules[__name__])


generate = MultiTurn(Countdown)


def chat(text="1+1=", **metadata):
    return Prompt(id="p:0", messages=({"role": "user", "content": text},), label="2", metadata=metadata)


def config(turns=3, most=32, context=400, samples=2):
    return RolloutConfig(
        samples_per_prompt=samples,
        sampling=SamplingParams(max_tokens=most),
        max_context_tokens=context,
        max_turns=turns,
    )


def says(encoder, *texts, end="<eos>"):
    """Make a script that says one text after the other, by the turns that are in the request."""

    def script(request):
        turn = encoder.decode(request.tokens, special=True).count("<assistant>") - 1
        return encoder.encode_text(texts[turn % len(texts)] + end)

    return script


def trained(encoder, sample):
    """Return the text of each run of tokens that are trained on."""
    runs, previous = [], 0
    for token, flag in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True):
        if flag:
            runs = [*runs, [token]] if not previous else [*runs[:-1], [*runs[-1], token]]
        previous = flag
    return [encoder.decode(run, special=True) for run in runs]


async def test_turns_are_appended_and_only_the_policy_s_tokens_are_trained_on(keeps):
    records = await check_generate(generate, keeps, [chat()], config=config(), script=says(keeps, "a/b", "cd"))
    for (sample,), index in zip(records, range(2), strict=True):
        assert keeps.decode(sample.tokens, special=True) == (
            "<user>1+1=\n<assistant>a/b<eos>\n<user>more 0\n<assistant>cd<eos>"
        )
        assert trained(keeps, sample) == ["a/b<eos>", "cd<eos>"]
        assert (sample.index, sample.fork, sample.status) == (index, 0, SampleStatus.COMPLETED)
        assert [(s.version, s.end - s.start) for s in sample.versions] == [(7, 4), (7, 3)]
        assert sample.metadata["turns"] == 2
        assert sample.metadata["heard"] == ["a/b", "cd"]
        assert [m["role"] for m in sample.metadata["messages"]] == ["user", "assistant", "user", "assistant"]


async def test_what_the_template_changes_goes_on_in_a_record_of_its_own(drops):
    script = says(drops, "thought/b", "idea/d", "e")
    records = await check_generate(generate, drops, [chat(turns=3)], config=config(), script=script)
    for trajectory in records:
        assert [s.fork for s in trajectory] == [0, 1, 2]
        assert [trained(drops, s) for s in trajectory] == [["thought/b<eos>"], ["idea/d<eos>"], ["e<eos>"]]
        assert [drops.decode(s.tokens, special=True) for s in trajectory][1:] == [
            "<user>1+1=\n<assistant>b<eos>\n<user>more 0\n<assistant>idea/d<eos>",
            "<user>1+1=\n<assistant>b<eos>\n<user>more 0\n<assistant>d<eos>\n<user>more 1\n<assistant>e<eos>",
        ]
    script = says(drops, "a", "b", "thought/c", "d")
    (trajectory, _) = await check_generate(generate, drops, [chat(turns=4)], config=config(4), script=script)
    assert [trained(drops, s) for s in trajectory] == [["a<eos>", "b<eos>", "thought/c<eos>"], ["d<eos>"]]


async def test_forks_are_scored_together_in_a_rollout(drops):
    engine = ScriptedEngine([5], script=says(drops, "thought/b", "2"))
    rollout = Rollout(engine, drops, load_reward("exact_match"), config(), generate=load_generate(f"{THIS}:generate"))
    (group,) = await rollout.run([chat()], version=0)
    assert [(s.index, s.fork, s.reward) for s in group] == [(i, f, 1.0) for i in range(2) for f in range(2)]
    assert len({r.session_id for r, _, _ in engine.history}) == 2


@pytest.mark.parametrize(
    ("values", "texts", "turns", "text"),
    [
        ({"turns": 2}, ("a", "b"), 2, "<user>1+1=\n<assistant>a<eos>\n<user>more 0\n<assistant>b<eos>"),
        ({"most": 3}, ("abcdef",), 1, "<user>1+1=\n<assistant>abc"),
        ({"context": 30}, ("a", "b"), 1, "<user>1+1=\n<assistant>a<eos>"),  # no room for the answer and a token
        ({"context": 27}, ("abcdef",), 1, "<user>1+1=\n<assistant>abcde"),
    ],
)
async def test_turns_and_context_are_bounds(keeps, values, texts, turns, text):
    records = await check_generate(
        generate, keeps, [chat(turns=9)], config=config(**values), script=says(keeps, *texts)
    )
    for (sample,) in records:
        assert keeps.decode(sample.tokens, special=True) == text
        assert (sample.metadata["turns"], sample.status) == (turns, SampleStatus.TRUNCATED)


async def test_a_turn_that_is_cut_goes_on_from_its_tokens(keeps):
    engine = ScriptedEngine([5], script=says(keeps, "ab", "cd"))
    original = engine.generate

    async def cutting(request, **options):
        whole = await original(request, **options)
        if len(engine.history) % 2 == 0:  # every second request is the rest of a turn
            return whole
        return type(whole)((5,), (-0.5,), (type(whole.versions[0])(3, 0, 1),), SampleStatus.ABORTED)

    engine.generate = cutting
    rollout = Rollout(engine, keeps, load_reward("exact_match"), config(samples=1), generate=generate)
    (group,) = await rollout.run([chat()])
    (sample,) = group
    first = keeps.decode([5])
    assert trained(keeps, sample) == [f"{first}ab<eos>", f"{first}cd<eos>"]
    assert [s.version for s in sample.versions] == [3, 0, 3, 0]
    assert len({r.seed for r, _, _ in engine.history}) == 4


async def test_tools_are_called_and_answered(keeps):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
    found = json_tool_calls(f"I add {call} and <tool_call>[</tool_call><tool_call>[1]</tool_call>")
    assert found[0] == ToolCall("add", {"a": 1, "b": 1})
    assert [bool(c.error) for c in found] == [False, True, True]
    environment = calculator(chat())
    unknown, wrong = ToolCall("sub"), ToolCall("add", {"c": 1})
    answers = await environment.reply(Turn(0, "", (*found, unknown, wrong), SampleStatus.COMPLETED))
    assert [m["role"] for m in answers] == ["tool"] * 5
    assert answers[0]["content"] == "2"
    assert all("cannot be read" in m["content"] for m in answers[1:3])
    assert answers[3]["content"] == "error: no tool 'sub'; there are add"
    assert "error: TypeError" in answers[4]["content"]

    async def slow():
        await asyncio.sleep(300)

    async def long():
        return "x" * 50

    other = ToolEnvironment({"slow": slow, "long": long}, timeout_s=0.02, most_characters=10)
    texts = [m["content"] for m in await other.reply(Turn(0, "", (ToolCall("slow"), ToolCall("long")), "completed"))]
    assert texts == ["error: slow took longer than 0.02 s", "xxxxxxxxxx... (50 characters)"]
    assert await other.reply(Turn(0, "done", (), SampleStatus.COMPLETED)) == []


def parse_sum(text):
    left, plus, right = text.partition("+")
    return [ToolCall("add", {"a": int(left), "b": int(right)})] if plus else []


async def test_a_parser_of_ones_own_and_a_tool_in_a_trajectory(keeps):
    played = MultiTurn("vime_rollout.experimental:calculator", parser=f"{THIS}:parse_sum")
    records = await check_generate(played, keeps, [chat()], config=config(), script=says(keeps, "1+1", "2"))
    assert {keeps.decode(s.tokens, special=True) for (s,) in records} == {
        "<user>1+1=\n<assistant>1+1<eos>\n<tool>2\n<assistant>2<eos>"
    }


class Fails(Countdown):
    async def reply(self, turn):
        if turn.text == "slow":
            await asyncio.sleep(300)
        raise EngineError("no room service") if turn.text == "own" else KeyError("oops")


@pytest.mark.parametrize(
    ("text", "what"), [("slow", "did not answer in time"), ("own", "no room service"), ("x", "KeyError: 'oops'")]
)
async def test_an_environment_that_fails_ends_the_step_with_its_cause(keeps, text, what):
    engine = ScriptedEngine([5], script=says(keeps, text))
    played = MultiTurn(Fails, reply_deadline_s=0.02 if text == "slow" else 60.0)
    rollout = Rollout(engine, keeps, load_reward("exact_match"), config(), generate=played)
    with pytest.raises(RolloutError, match=what) as caught:
        await rollout.run([chat()])
    assert "of group p:0@0" in caught.value.__notes__[0]


async def test_misuse_is_told(keeps):
    with pytest.raises(ExtensionError, match="cannot be made"):
        MultiTurn(f"{THIS}:THIS")
    with pytest.raises(ExtensionError, match="tool-call parser is async"):
        MultiTurn(Countdown, parser="vime_rollout.experimental.tools:add")
    rollout = Rollout(ScriptedEngine([5]), keeps, load_reward("exact_match"), config(context=8), generate=generate)
    with pytest.raises(RolloutError, match="need chat messages"):
        await rollout.run([Prompt(id="p", text="1+1=")])
    with pytest.raises(RolloutError, match="no room for a response"):
        await rollout.run([chat()])


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ids_only_grow_and_each_sampled_one_is_trained_on_once(keeps, drops, data):
    encoder = data.draw(st.sampled_from([keeps, drops]), label="template")
    letters = (*encoder.encode_text("abc0/ <>"), 0, 1, 2, 3)  # with special tokens in the middle of what it says
    salt = data.draw(st.integers(0, 2**32), label="salt")
    shape = config(
        turns=data.draw(st.integers(1, 5), label="turns"),
        most=data.draw(st.integers(1, 12), label="most"),
        context=data.draw(st.integers(24, 120), label="context"),
    )

    def script(request):
        draw = random.Random(f"{salt}/{request.seed}")
        return [draw.choice(letters) for _ in range(draw.randrange(0, 14))]

    async def run():
        await check_generate(generate, encoder, [chat(turns=9)], config=shape, script=script)
        engine = ScriptedEngine([5], script=script)
        rollout = Rollout(engine, encoder, load_reward("exact_match"), shape, generate=generate)
        for index in range(2):
            engine.history.clear()
            records = await generate(rollout, encoder.encode(chat(turns=9)), index, 0)
            sampled = [t for _, g, _ in engine.history for t in g.tokens]
            kept = [
                token
                for s in records
                for token, flag in zip(s.tokens[s.prompt_length :], s.loss_mask, strict=True)
                if flag
            ]
            assert kept == sampled
            for record in records:
                grown = [r.tokens for r, _, _ in engine.history if r.tokens == record.tokens[: len(r.tokens)]]
                assert all(a == b[: len(a)] for a, b in pairwise(grown))
                given_text = [i for i, flag in enumerate(record.loss_mask) if not flag]
                covered = {i for span in record.versions for i in range(span.start, span.end)}
                assert not covered & set(given_text)
                assert all(record.logprobs[i] == 0.0 for i in given_text)

    asyncio.run(run())
