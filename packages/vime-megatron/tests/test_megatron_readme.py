"""The README's example runs as it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
MODELS = PACKAGE.parents[1] / "integration"


@pytest.mark.skipif(not MODELS.is_dir(), reason="the example's model lies in the repository, not in the package")
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    _, _, rest = (PACKAGE / "README.md").read_text().partition("```python\n")
    code, _, _ = rest.partition("```")
    (tmp_path / "integration").symlink_to(MODELS)
    monkeypatch.chdir(tmp_path)
    names = {}
    try:
        exec(compile(code, "README.md", "exec"), names)
    finally:
        if "trainer" in names:  # a process has one; an example that fails half-way must not keep the others from theirs
            names["trainer"].close()
    assert "StepMetrics(loss=" in capsys.readouterr().out
    assert (tmp_path / "runs" / "step-2" / "manifest.json").is_file()
    assert (tmp_path / "runs" / "hf" / "tokenizer_config.json").is_file()
