"""A real vLLM server, in bf16, on the trainer's own memory; killed, and started again with weights of its own.

The second server loads a checkpoint by vLLM's own loaders. That makes it the judge of what the first one served: live
bytes are compared by vLLM's weight checker, aliased against loaded, and synced against aliased.
"""

import json

import pytest
from sync_models import DENSE, fill, laid_out
from vime_sync import AliasError, EngineError, NotStartedError, Publisher, SyncSession, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(500)]

MODEL = DENSE | {"tie_word_embeddings": True, "vocab_size": 100, "dtype": "bfloat16", "intermediate_size": 512}


def write(session, publisher, version, seed):
    """One writing block; what it reported."""
    with session.writing(version) as block, publisher.writing(version):
        fill(publisher.source, MODEL, seed)
    return block.report


def test_an_aliased_engine_lives_dies_and_is_brought_back(make_model, serve, tmp_path):
    publisher = Publisher(laid_out(MODEL, padded_words=128))
    fill(publisher.source, MODEL, 0)
    publisher.stage(1)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(publisher.manifest()))
    folder = make_model(MODEL, seed=0)
    arguments = engine_arguments(weights="alias", manifest=path)
    server = serve(folder, dtype="bfloat16", arguments=arguments).ready()
    session = SyncSession([server.url], publisher.manifest(), deadline_s=60)
    try:
        first = {"bytes": server.checksums(), "tokens": server.generate()["token_ids"]}
        assert server.state()["version"] == -1  # nobody has connected, but it serves what the trainer holds
        session.connect()
        assert (session.versions(), server.state()["label"]) == ([1], "1")
        report = write(session, publisher, 2, seed=1)
        second = {"bytes": server.checksums(), "tokens": server.generate()["token_ids"]}
        assert (report.mode, report.bytes, report.digest) == ("alias", 0, publisher.staged_digest)
        assert [name for name, value in second["bytes"].items() if value == first["bytes"][name]] == []
        assert second["tokens"] != first["tokens"]
        assert server.generate()["weight_versions"] == [{"version": "2", "start": 0, "end": 12}]
        with pytest.raises(AliasError, match="an engine runs on these buffers"):
            publisher.close()

        server.kill()
        again = serve(folder, dtype="bfloat16", port=server.port).ready()
        assert again.checksums() == first["bytes"]  # what was aliased is, bit for bit, what vLLM loads
        assert again.generate()["token_ids"] == first["tokens"]
        publisher.stage(2)  # the same bytes; what is asked for next is not there, and nobody there knows us
        with pytest.raises((EngineError, NotStartedError)):
            session.update(3)
        session.replace(server.url, again.url)
        report = session.resync(again.url)
        assert (report.version, report.mode, report.digest) == (2, "shadow", publisher.staged_digest)
        assert again.checksums() == second["bytes"]  # what was copied is, bit for bit, what was aliased
        assert again.generate()["token_ids"] == second["tokens"]
        assert again.generate()["weight_versions"][0]["version"] == "2"
        assert session.resync(again.url).bytes == 0  # proved by its live bytes
        assert write(session, publisher, 3, seed=0).mode == "shadow"  # the block serves engines that copy, too
        assert again.checksums() == first["bytes"]
    finally:
        session.close()
        server.stop()
        publisher.close(force=True)
