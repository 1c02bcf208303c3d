"""The vLLM side of vime-sync, the only part that imports vLLM.

vLLM finds it by two entry points. ``vllm.general_plugins`` calls `register` in every vLLM process: it adds the
weight-transfer backend ``vime`` and the load format ``vime``. ``vllm.endpoint_plugins`` adds the HTTP routes under
``/vime`` to the API server; vLLM loads it only if ``VLLM_PLUGINS`` names ``vime_sync``, which `engine_environment`
does.
"""

from __future__ import annotations

import logging

BACKEND = "vime"
LOAD_FORMAT = "vime"
logger = logging.getLogger(__name__)


def register() -> None:
    """Register the backend and the load format; safe to call more than once.

    Raises:
        WindowError: If the installed vLLM lacks a part of the interface that the plugin uses.
    """
    from vime_sync.vllm_plugin.window import check_window

    for lack in check_window():
        logger.info("vime-sync: %s", lack)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor import model_loader

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vime_sync.vllm_plugin.backend", "VimeWeightTransferEngine"
        )
    if LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from vime_sync.vllm_plugin.loader import VimeModelLoader

        model_loader.register_model_loader(LOAD_FORMAT)(VimeModelLoader)
