"""Real vLLM servers for tests: processes on this machine, tiny checkpoints, answers, and the CPU test bed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests/corpus"
TESTBED = ROOT / "tools/cpu_testbed"
PROMPTS = ([1, 2, 3, 4, 5], [100, 200, 250, 17, 23, 42, 7])
START_S = 240
COMPILE_OPTION = {
    "--tensor-parallel-size": "--tp",
    "--data-parallel-size": "--dp",
    "--enable-expert-parallel": "--ep",
}
"""vLLM's option -> `rdtplan compile`'s."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_SERVER_DEV_MODE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every worker wants a NUMA node of its own
}


class Server:
    """A vLLM server process and everything that it started."""

    def __init__(self, checkpoint: Path, options: tuple[str, ...], environment: dict[str, str]) -> None:
        """Start and wait until it answers."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = checkpoint.parent / f"server-{port}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "PYTHONPATH"}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--seed", "0"]
        command += ["--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
        command += ["--kv-cache-memory-bytes", str(64 << 20), *options]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | ENVIRONMENT | environment,
                cwd=checkpoint.parent,
                process_group=0,  # and no session: Linux shares cores by session, and its workers would take all
            )
        deadline = time.monotonic() + START_S
        try:
            while not self._answers():
                assert self._process.poll() is None and time.monotonic() < deadline, self.tail()
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=2).ok
        return False

    def tail(self) -> str:
        """The end of the server's log."""
        return self.log.read_text()[-4000:]

    def post(self, path: str, **params: str) -> None:
        post(self.url, path, **params)

    def completions(self) -> list[Any]:
        """See `completions`."""
        return completions(self.url)

    def kill(self) -> None:
        """As a crash would end it."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server and its workers, and remove the shared memory that they had mapped and left behind."""
        shared = self._shared_memory()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in shared:
            path.unlink(missing_ok=True)

    def _shared_memory(self) -> set[Path]:
        """Files in /dev/shm that processes of the server's session have mapped."""
        found: set[Path] = set()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == self._process.pid:
                    lines = (entry / "maps").read_text().splitlines()
                    found |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
        return {path for path in found if not path.name.endswith("(deleted)")}


def post(url: str, path: str, **params: str) -> None:
    """One of the server's control routes."""
    requests.post(f"{url}/{path}", params=params, timeout=60).raise_for_status()


def completions(url: str) -> list[Any]:
    """Greedy tokens with their logprobs, and those of the best three."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        body |= {"return_token_ids": True, "logprobs": 3}
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.ok, answer.text
        choice = answer.json()["choices"][0]
        found.append([choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]])
    return found


@contextlib.contextmanager
def server(checkpoint: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    running = Server(checkpoint, options, environment or {})
    try:
        yield running
    finally:
        running.stop()


def write_tokenizer(directory: Path) -> None:
    """512 words `t0` to `t511`: the completions route wants a tokenizer even for token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(512)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1", pad_token="t0")
    tokenizer.save_pretrained(directory)


def write_checkpoint(name: str, directory: Path, seed: int) -> Path:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text((CORPUS / f"configs/{name}.json").read_text())
    write_tokenizer(directory)
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for weight, dtype, shape in json.loads((CORPUS / f"manifests/{name}.json").read_text()):
        values = torch.randn(shape, generator=rng) * (0.1 if len(shape) > 1 else 0.2)
        weights[weight] = (values + (1 if "norm" in weight else 0)).to(getattr(torch, dtype))
    save_file(weights, str(directory / "model.safetensors"))
    return directory


def compile_plan(checkpoint: Path, *options: str) -> str:
    plan = checkpoint.parent / "fleet.plan"
    command = [sys.executable, "-m", "rdtplan.cli", "compile", str(checkpoint), "--manifest", str(checkpoint)]
    done = subprocess.run([*command, *options, "-o", str(plan)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return str(plan)


def cpu_testbed(directory: Path) -> dict[str, str]:
    """Environment that switches the CPU test bed on: its entry points, as an installation would declare them."""
    project = tomllib.loads((TESTBED / "pyproject.toml").read_text())["project"]
    info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(sections))
    return {"RDTPLAN_CPU_TESTBED": "1", "PYTHONPATH": f"{directory}{os.pathsep}{TESTBED}"}


def make_source(checkpoint: Path) -> Any:
    """A trainer whose weights are those of a checkpoint; `use` is its training step."""
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def use(self, checkpoint: Path) -> None:
            self.weights = load_file(str(checkpoint / "model.safetensors"))

        def metadata(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.weights.items()]

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield from self.weights.items()

    source = Source()
    source.use(checkpoint)
    return source
