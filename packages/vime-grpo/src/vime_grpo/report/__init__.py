"""The report of a run: one HTML page that holds everything it shows, for reading, sending and archiving.

::

    from vime_grpo.report import write_report

    write_report("runs/demo")  # runs/demo/report.html

The page needs no network and runs no script, and a content security policy in it forbids both: text that a model wrote
is shown in it, so nothing of it may ever act. `recorded` reads what a run left behind, `charts` and `gantt` draw it as
SVG, `page` puts it together. Needs the extra ``report`` (matplotlib and Jinja).
"""

from vime_grpo.report.page import write_report
from vime_grpo.report.recorded import RecordedRun, read_run

__all__ = ["RecordedRun", "read_run", "write_report"]
