"""A probe worker without devices, for faults that no real device can be made to show on demand.

It speaks the worker's protocol and follows the two rules that the probe distinguishes: an ordinal must exist in the
importer, and the bytes are those of the handle. STAND_IN says what goes wrong, as ``role:fault``. The real worker is
held to the same protocol by test_devices_gpu.py and the committed results of a run on two GPUs.
"""

import hashlib
import json
import os
import sys
import time

role = sys.argv[-1]
fault = (
    os.environ.get("STAND_IN", "").removeprefix(f"{role}:") if os.environ.get("STAND_IN", "").startswith(role) else ""
)
mask = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"))
UUIDS = json.loads(os.environ["STAND_IN_UUIDS"])
tokens = [] if mask == "-1" else mask.split(",")
uuids = [UUIDS[int(token)] if token.isdigit() else token.removeprefix("GPU-") for token in tokens]


def say(**message):
    print(json.dumps(message), flush=True)


if fault == "hang-start":
    time.sleep(60)
if fault == "die":
    sys.exit("segmentation fault, or something like it")
if fault == "mute":
    os.close(1)
    time.sleep(60)
if fault == "no-torch":
    say(event="error", text="ImportError: No module named 'torch'")
    sys.exit(1)
say(
    event="ready",
    devices=[{"ordinal": i, "uuid": uuid, "name": "stand-in"} for i, uuid in enumerate(uuids)],
    torch="0",
    runtime="none",
    pid=os.getpid(),
)
first = None
for line in sys.stdin:
    request = json.loads(line)
    if fault == "hang":
        time.sleep(60)
    if fault == "garbage":
        print("Segmentation fault", flush=True)
    elif fault == "list":
        print("[]", flush=True)
    elif fault == "refuse":
        say(event="refused", number=request.get("number"), text="out of memory")
    elif role == "export":
        if fault == "late" and request["number"] == 1:
            time.sleep(2.0)
        first = first or request["nonce"]
        nonce = first if fault == "stale" else "00" * 32 if fault == "zeros" else request["nonce"]
        handle = {"device": request["ordinal"], "handle": nonce, "size": request["size"]}
        say(event="exported", number=request["number"], handle=handle)
    else:
        handle, ordinal = request["handle"], request["ordinal"]
        used = handle["device"] if ordinal is None else ordinal
        if used >= len(uuids):
            say(event="refused", text="CUDA error: invalid device ordinal")
        else:
            data = bytes.fromhex(handle["handle"]) * (handle["size"] // 32)
            say(event="opened", ordinal=used, sha256=hashlib.sha256(data).hexdigest(), head=data[:32].hex())
