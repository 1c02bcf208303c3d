"""Real vLLM servers on the CPU with two tensor-parallel workers, and with experts.

They start one after the other (each takes half a minute), so these tests are last and few.
"""

import os

import httpx
import pytest
from sync_models import DENSE, MOE, checkpoint
from vime_sync import UnplannableError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif("VIME_SYNC_SLOW" not in os.environ, reason="two minutes more: set VIME_SYNC_SLOW=1"),
]


def checksums(server):
    return server.post("/weight_checker", action="checksum").json()["checksums"]


def test_two_tensor_parallel_workers(make_model, serve, trainers):
    server = serve(make_model(DENSE, seed=0), "--tensor-parallel-size", "2").ready(300)
    try:
        loaded, tokens = checksums(server), server.generate()
        trainer = trainers(checkpoint(DENSE, 1))
        digests = []
        with trainer.session(server) as session:
            for version, seed in ((1, 1), (2, 0)):
                trainer.load(checkpoint(DENSE, seed))
                trainer.publisher.stage(version)
                digests.append(session.update(version).digest)
                if version == 1:
                    assert [n for n, value in checksums(server).items() if value == loaded[n]] == []
                    assert server.generate()["token_ids"] != tokens["token_ids"]
        assert checksums(server) == loaded
        assert server.generate()["token_ids"] == tokens["token_ids"]
        assert httpx.get(f"{server.url}/vime/state", timeout=20).json()["workers"] == 2
        assert digests[1] == trainer.publisher.staged_digest
    finally:
        server.stop()


def test_experts(make_model, serve, trainers):
    """vLLM's CPU kernels keep experts packed, which no copy can reach: refused by name, or loaded again if allowed."""
    server = serve(make_model(MOE, seed=0)).ready(300)
    try:
        tokens = server.generate()
        trainer = trainers(checkpoint(MOE, 1))
        trainer.publisher.stage(1)
        with pytest.raises(UnplannableError, match="experts"):
            trainer.session(server).update(1)
        assert server.generate()["token_ids"] == tokens["token_ids"]
        with trainer.session(server, reload=True, takeover=True) as session:
            report = session.update(1)
            assert report.reload
            assert all("experts" in name for name in report.reload)
            assert server.generate()["token_ids"] != tokens["token_ids"]
            trainer.load(checkpoint(MOE, 0))
            trainer.publisher.stage(2)
            session.update(2)
        again = server.generate()
        assert again["token_ids"] == tokens["token_ids"]
        assert again["weight_versions"][0]["version"] == "2"
    finally:
        server.stop()
