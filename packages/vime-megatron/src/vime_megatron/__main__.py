"""``python -m vime_megatron`` is ``vime-megatron``."""

from vime_megatron.cli import app

app(prog_name="vime-megatron")
