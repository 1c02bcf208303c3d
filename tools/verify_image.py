"""Verify an image, or any environment: one line a check, with what was seen and what was expected.

    python tools/verify_image.py --platform rocm --vllm-tag v0.29.0 --vllm-commit 98dff2a8... --base-record base.json

Run it with the interpreter that is to be verified, at the end of a build and again in a container with devices. Needs
the standard library only. The checks are in ``image/verify``; ``docker/README.md`` lists their labels.

Exit: 0 where no check failed; else 1, with the failed labels as the last line on stderr. Checks that need a GPU are
skipped without one, with the reason; ``--require-devices`` makes those failures.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "image"))

from verify.context import NUMPY_RANGE, PLATFORMS, VLLM_WINDOW, Context, detect_platform
from verify.devices import check_devices
from verify.distributions import check_distributions
from verify.engine import check_engine
from verify.interpreters import check_imports, check_orders
from verify.libraries import check_libraries
from verify.report import Result, Status, as_json
from verify.settings import check_settings


def check_together(context: Context) -> Iterator[Result]:
    """Import everything in either order, then judge what that mapped."""
    orders = check_orders(context)
    yield from orders.results
    yield from check_libraries(context, orders)


# What each group's labels look like, so that --only can leave a whole group out without running it.
GROUPS: tuple[tuple[str, Callable[[Context], Iterable[Result]]], ...] = (
    ("distributions", check_distributions),
    ("engine", check_engine),
    ("imports", check_imports),
    ("orders", check_together),
    ("settings", check_settings),
    ("devices", check_devices),
)


def main(argv: list[str] | None = None) -> int | str:
    """Run the checks.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        0, or the text of the failed labels, which ``sys.exit`` prints before it exits with 1.
    """
    options = parse_arguments(argv)
    context = Context(
        platform=options.platform if options.platform != "auto" else detect_platform(),
        vllm_tag=options.vllm_tag,
        vllm_commit=options.vllm_commit,
        vllm_window=options.vllm_window,
        numpy_range=options.numpy,
        base_record=options.base_record,
        deadline_s=options.deadline,
    )
    results: list[Result] = []
    for name, check in GROUPS:
        if not fnmatch(name, options.group):
            continue
        for found in check(context):
            result = found
            if options.require_devices and found.status is Status.SKIP and context.no_device_reason in found.seen:
                result = dataclasses.replace(found, status=Status.FAIL)
            results.append(result)
            if not options.json:
                print(result.line(), flush=True)
    if options.json:
        print(as_json(results, context.platform))
    failed = [result.label for result in results if result.status is Status.FAIL]
    if not options.json:
        count = {status: sum(result.status is status for result in results) for status in Status}
        print(f"{context.platform}: {count[Status.OK]} ok, {count[Status.SKIP]} skipped, {count[Status.FAIL]} failed")
    return f"failed: {', '.join(failed)}" if failed else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line.

    Args:
        argv: Arguments; those of the process by default.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(description="Verify an image: one line a check, seen and expected.")
    parser.add_argument(
        "--platform", choices=["auto", *PLATFORMS], default="auto", help="default: what torch is built for"
    )
    parser.add_argument("--vllm-tag", default="", help="the release that was built, such as v0.29.0")
    parser.add_argument("--vllm-commit", default="", help="its full commit")
    parser.add_argument("--vllm-window", default=VLLM_WINDOW, help=f"versions that our code supports ({VLLM_WINDOW})")
    parser.add_argument("--numpy", default=NUMPY_RANGE, help=f"versions that the image supports ({NUMPY_RANGE})")
    parser.add_argument("--base-record", type=Path, help="what constraints.py --record wrote before the first install")
    parser.add_argument(
        "--require-devices", action="store_true", help="fail where a check is skipped for want of a GPU"
    )
    parser.add_argument("--group", default="*", help=f"only these checks: {', '.join(name for name, _ in GROUPS)}")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one fresh interpreter")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
