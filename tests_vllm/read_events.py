"""Reads KV events with vLLM's own classes, in vLLM's environment, and writes each event as a line of JSON.

    python read_events.py REPLAY_ENDPOINT

For each line on stdin it asks for everything from the first batch on, and writes an empty line at the end. Imports
nothing of ours.
"""

import json
import os
import sys
from typing import Any

import zmq


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    context = zmq.Context()

    def write(payload: bytes) -> None:
        for event in decoder.decode(payload).events:
            fields: dict[str, Any] = {"type": type(event).__name__}
            fields |= {name: getattr(event, name) for name in event.__struct_fields__}
            print(json.dumps(fields), file=answers)

    for _ in sys.stdin:
        # As vLLM's ZmqEventPublisher answers: each batch, then the end.
        asking = context.socket(zmq.DEALER)
        asking.connect(sys.argv[1])
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, _, sequence, payload = asking.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                break
            write(payload)
        asking.close()
        print(file=answers)


if __name__ == "__main__":
    main()
