"""The report: one page that shows the run, holds everything it shows, and lets no text of a model act."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vime_grpo.cli import app
from vime_grpo.errors import LaunchError, ReportError
from vime_grpo.report import read_run, write_report
from vime_grpo.report.charts import MAX_POINTS, draw_charts, running_mean, series
from vime_grpo.samples import SampleRecord, SamplesWriter
from vime_grpo.timeline import TimelineWriter
from vime_grpo.tracking import MetricsWriter

STEPS = 50
HOSTILE = '</pre><script>alert("x")</script><img src=x onerror=alert(1)> & {{ 7 * 7 }} \ud800'
SEEN = HOSTILE.replace("\ud800", "?")  # no UTF-8 for it


def metrics(step: int) -> dict[str, float]:
    row = {
        "rollout/raw_reward": step / STEPS,
        "train/train_rollout_logprob_abs_diff": 1e-3 / step,
        "train/ppo_kl": 0.01,
        "train/entropy_loss": 1 / step,
        "rollout/lag/samples_0": 3.0,
        "rollout/lag/samples_1": 1.0,
        "perf/rollout_time": 2.0,
        "perf/train_time": 1.0,
        "perf/step_time": 3.5,
        "perf/tokens_per_gpu_per_sec": 100.0 * step,
        "memory/rollout/<engine>_$gib": 1.5,
        "proc/driver_rss_mib": 512.0,
    }
    if step % 10 == 0:
        row |= {"eval/reward": 0.5, "eval/reward_sem": 0.1, "eval/pass@1": 0.5, "perf/save_time": 0.25}
    return row


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "<b>demo & co"
    with MetricsWriter(folder / "metrics.jsonl") as writer, SamplesWriter(folder / "samples.jsonl") as samples:
        for step in range(1, STEPS + 1):
            writer.write(step, metrics(step))
            texts = {"prompt": f"prompt {step}", "group": HOSTILE, "index": 1, "reason": HOSTILE, "label": HOSTILE}
            best = SampleRecord(rank="best", reward=step / STEPS, response=HOSTILE, **texts)  # type: ignore[arg-type]
            worst = SampleRecord(rank="worst", reward=-float(step), response=f"bad {step}", **texts)  # type: ignore[arg-type]
            samples.write(step, [best, worst])
    (folder / "config.toml").write_text("# </pre><script>alert(2)</script>\n[pipeline]\nsteps = 50\n")
    return folder


class Page(HTMLParser):
    """The elements of a page and the texts of those whose text matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "use", "rect"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


@pytest.fixture(scope="module")
def html(run_folder: Path) -> str:
    return write_report(run_folder).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_stands_alone_and_nothing_in_it_can_act(page: Page) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "img", "image", "form", "base", "foreignobject"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has a handler"
            if name in ("href", "src", "xlink:href", "action", "data"):
                assert (value or "").startswith("#"), f"{tag} loads {value}"
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "@import" not in page.texts["style"][0]


def test_text_of_models_and_files_is_shown_as_it_is(page: Page, run_folder: Path) -> None:
    assert page.texts["h1"] == ["<b>demo & co"]
    assert SEEN in page.texts["pre"]
    assert any(text.startswith("# </pre><script>alert(2)") for text in page.texts["pre"])
    assert any(text.startswith(f"verifier: {SEEN}") for text in page.texts["br"])
    assert "bad 50" in page.texts["pre"], "the sample with the lowest reward of the run"
    assert {"step 1", "step 11", "step 50"} <= set(page.texts["summary"])


def test_charts_are_whole_and_their_identities_unique(html: str, page: Page) -> None:
    titles = page.texts["h3"]
    for title in (
        "Reward",
        "Reward over time",
        "Evaluation",
        "Difference of log-probabilities between trainer and engine",
        "KL",
        "Entropy",
        "Lag of samples behind the weights that trained on them",
        "Throughput of generation",
        "Phases of a step",
        "Memory",
    ):
        assert title in titles
    assert "Queue between engines and trainer" not in titles, "the run has no such metric"
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(drawings) == sum(tag == "figure" for tag, _ in page.elements)
    for drawing in drawings:
        ET.fromstring(drawing)
    identities = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identities) == len(set(identities))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
    assert references <= set(identities)
    labels = page.texts["text"]
    assert "minutes in steps" in labels
    assert {"0.001", "0.0001"} <= set(labels), "of the logarithmic axis"
    assert not [label for label in labels if "\\" in label], "nothing is written as a formula"
    assert {"rollout/raw_reward", "memory/rollout/<engine>_$gib", "perf/train_time", "150"} <= set(labels)


def test_the_timeline_shows_lanes_steps_and_the_resume(tmp_path: Path, page: Page) -> None:
    assert "Timeline" not in page.texts["h2"], "a run of before there were timelines"
    for session, steps in enumerate([range(1, 3), range(3, 5)]):
        resume = None if session == 0 else 2
        with (
            MetricsWriter(tmp_path / "run" / "metrics.jsonl", resume_step=resume) as writer,
            TimelineWriter(tmp_path / "run" / "phases.jsonl", resume_step=resume) as timeline,
        ):
            for step in steps:
                begin = 1000.0 * session + 10 * step
                timeline.add(step, "rollout", "generate", begin, begin + 10)
                timeline.add(step, "trainer", "wait_for_rollout", begin, begin + 2)
                timeline.add(step, "trainer", "<train>", begin + 2, begin + 8)
                timeline.add(step, "<sync>", "update_weights", begin + 8, begin + 9)
                timeline.write()
                writer.write(step, {"rollout/raw_reward": 0.5, "perf/step_time": 10.0})
    text = write_report(tmp_path / "run").read_text()
    drawn = Page(text)
    assert drawn.texts["h2"][0] == "Timeline"
    assert drawn.texts["h3"][0] == "Timeline"
    (drawing,) = re.findall(r'<svg[^>]*aria-label="Timeline".*?</svg>', text, flags=re.DOTALL)
    words = [element.text for element in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    assert {"rollout", "trainer", "<sync>", "generate", "<train>", "wait_for_rollout", "resumed"} <= set(words)
    for step in "1234":
        assert words.count(step) == 2, "on the bars of training and sync; what goes on has no number"
    assert "40" in words, "four steps of ten seconds, without the time between the sessions"
    assert "1000" not in words


def test_the_summary_compares_the_beginning_with_the_end(page: Page) -> None:
    cells = page.texts["td"]
    row = cells[cells.index("reward") :][:5]
    assert row == ["reward", "0.040", "0.980", "0.020", "1.000"]
    assert "50 steps, 1 to 50; 2.9 minutes in steps." in " ".join(page.texts["p"][0].split())


def test_another_run_is_drawn_beside_by_its_name(run_folder: Path, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "other" / "metrics.jsonl") as writer:
        for step in range(1, 4):
            writer.write(step, {"rollout/raw_reward": 0.5, "perf/step_time": 7200.0})
    result = CliRunner().invoke(app, ["report", str(tmp_path / "other"), "--compare", str(run_folder)])
    assert result.exit_code == 0
    page = Page((tmp_path / "other" / "report.html").read_text())
    assert page.texts["text"].count("<b>demo & co: rollout/raw_reward") == 2  # over steps and over time
    assert "<b>demo & co: train/entropy_loss" not in page.texts["text"]
    assert any(text == "Dashed: <b>demo & co (50 steps)." for text in page.texts["p"])
    assert {"2", "4", "6"} <= set(page.texts["text"])
    assert "hours in steps" in page.texts["text"]


def test_a_run_of_one_step_without_samples_or_configuration(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as writer:
        writer.write(1, {"rollout/raw_reward": 0.0, "perf/step_time": 1.0, "train/train_rollout_logprob_abs_diff": 0.0})
    page = Page(write_report(tmp_path / "run", tmp_path / "out" / "page.html").read_text())
    assert "None were kept (tracking.samples)." in page.texts["p"]
    assert sum(tag == "svg" for tag, _ in page.elements) == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["page.html"]


def test_long_runs_are_thinned_to_means_of_steps() -> None:
    rows = [{"step": float(step), "x": float(step)} for step in range(1, 2 * MAX_POINTS + 1)]
    steps, values = series(rows, "x")
    assert len(steps) == MAX_POINTS
    assert steps[:2] == values[:2] == [1.5, 3.5]
    assert series([{"step": 1.0, "x": float("nan")}, {"step": 2.0, "x": 3.0}], "x") == ([2.0], [3.0])
    assert running_mean([1.0, 2.0, 6.0], 2) == [1.5, 3.0, 4.0]


@pytest.mark.parametrize(("values", "shown"), [((3.2e-7, 5.5e-7), {"4e-07", "5e-07"}), ((1e-6, 0.5), {"1e-05", "0.1"})])
def test_a_logarithmic_axis_has_numbers_whatever_it_spans(values: tuple[float, float], shown: set[str]) -> None:
    name = "train/train_rollout_logprob_abs_diff"
    rows = [{"step": float(step), name: value} for step, value in enumerate(values, start=1)]
    ((_, drawing),) = draw_charts(rows)
    words = {element.text for element in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")}
    assert shown <= words


def test_drawing_leaves_no_setting_behind_and_is_repeatable() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    rows = [{"step": 1.0, "rollout/raw_reward": 0.5}, {"step": 2.0, "rollout/raw_reward": 0.75}]
    assert draw_charts(rows) == draw_charts(rows)
    assert dict(mpl.rcParams) == before


def test_what_cannot_be_reported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReportError, match=r"not a run folder.*no such folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(ReportError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="no finished step yet"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/raw_reward": 1.0}) + "\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(tmp_path, tmp_path / "file" / "page.html")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LaunchError, match=r"pip install 'vime-grpo\[report\]'"):
        write_report(tmp_path)


def test_the_command_prints_where_the_page_is(run_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run_folder), "--out", str(tmp_path / "page.html")])
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size > 10_000
    result = CliRunner().invoke(app, ["report", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert "not a run folder" in result.stderr
