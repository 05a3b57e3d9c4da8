"""Syncs while a vLLM server is generating: `pause` and `resume` around them, in the two modes that lose no request.

    python docs/examples/requests_in_flight.py

`wait` lets running requests end with the weights that they began with. `keep` freezes them; they go on after the sync
with the new weights, on the keys and values of the old ones (an RL trainer must correct for that or live with it).
Requests that arrive during the pause wait, and see the new weights only. All of it is checked. A third mode, `abort`,
ends running requests early.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path

import requests
import tiny
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from rdtexec.sources import CheckpointSource
from rdtexec.vllm.trainer import RdtExecTrainer, RdtExecTrainerInitInfo

TOKENS = 400


class Request(threading.Thread):
    """A streaming completion. `tokens` grows as they arrive."""

    def __init__(self, url: str, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.url, self.prompt = url, prompt
        self.tokens: list[int] = []
        self.reason = ""
        self.start()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": self.prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        with requests.post(f"{self.url}/v1/completions", json=body, stream=True, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    self.tokens += choice.get("token_ids") or []
                    self.reason = choice.get("finish_reason") or ""

    def reach(self, count: int) -> None:
        """Wait until so many tokens have arrived."""
        while len(self.tokens) < count:
            if not self.is_alive():
                raise SystemExit(f"a request ended after {len(self.tokens)} tokens: {self.reason!r}")
            time.sleep(0.01)

    def result(self) -> list[int]:
        self.join(300)
        tiny.check(f"a request is complete: {len(self.tokens)} tokens", len(self.tokens) == TOKENS)
        return self.tokens


def all_at_once(url: str) -> list[list[int]]:
    """What the server says now to each prompt."""
    running = [Request(url, prompt) for prompt in tiny.PROMPTS]
    return [request.result() for request in running]


def sync_in_flight(url: str, mode: str, trainer: RdtExecTrainer) -> tuple[list[Request], list[int], Request]:
    """(requests under way when the pause came, how many tokens each had then, a request made during the pause)."""
    running = [Request(url, prompt) for prompt in tiny.PROMPTS]
    for request in running:
        request.reach(10)
    tiny.post(url, "pause", mode=mode)
    time.sleep(0.5)  # what was on its way to us has arrived
    had = [len(request.tokens) for request in running]
    late = Request(url, tiny.PROMPTS[0])
    trainer.send_weights()
    time.sleep(0.5)
    tiny.check(f"{mode}: nothing is generated during the pause", [len(r.tokens) for r in running] == had)
    tiny.check(f"{mode}: a request made during the pause waits", not late.tokens)
    tiny.post(url, "resume")
    return running, had, late


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rdtexec-example-") as scratch:
        directory = Path(scratch)
        # float32, so that an answer does not depend on which requests were computed together
        first = tiny.write_checkpoint(directory / "first", seed=1, dtype="float32")
        second = tiny.write_checkpoint(directory / "second", seed=2, dtype="float32")
        with tiny.server(first, "--dtype", "float32") as running:
            source = CheckpointSource(first)
            info = RdtExecTrainerInitInfo(rank=0)
            client = HTTPVLLMWeightSyncClient(running.url)
            trainer = RdtExecTrainer.trainer_init(info, client=client, source=source)
            try:
                before = all_at_once(running.url)

                source.use(second)
                requests_, _, late = sync_in_flight(running.url, "wait", trainer)
                tiny.check(
                    "wait: running requests ended with the old weights", [r.result() for r in requests_] == before
                )
                after = all_at_once(running.url)
                tiny.check(
                    "wait: the new weights answer differently", all(a != b for a, b in zip(after, before, strict=True))
                )
                tiny.check("wait: the request made during the pause has the new weights", late.result() == after[0])

                source.use(first)
                requests_, had, late = sync_in_flight(running.url, "keep", trainer)
                tiny.check(f"keep: running requests were frozen at {had} tokens", all(n < TOKENS for n in had))
                for request, n, old in zip(requests_, had, after, strict=True):
                    tokens = request.result()
                    tiny.check("keep: the old weights until the pause", tokens[:n] == old[:n])
                    tiny.check("keep: other weights afterwards", tokens[n:] != old[n:])
                tiny.check("keep: the request made during the pause has the new weights", late.result() == before[0])
                tiny.check("the first weights are back", all_at_once(running.url) == before)
            finally:
                trainer.shutdown()


if __name__ == "__main__":
    main()
