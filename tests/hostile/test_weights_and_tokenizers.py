"""Weights, tokenizers and policies that would give garbage, take gigabytes or take down more than their own request."""

from __future__ import annotations

import re

import pytest

from bounded import run_bounded

WEIGHTS = r"""
import dataclasses
from safetensors.torch import save_file
from tiny import tiny_config, tiny_weights

config = tiny_config("qwen2")
weights = tiny_weights(config, torch.float32)
NAMES = {
    "embedding": "model.embed_tokens.weight", "product": "model.layers.1.self_attn.k_proj.weight",
    "norm": "model.layers.2.input_layernorm.weight", "bias": "model.layers.0.self_attn.q_proj.bias",
}

def with_one(name, value):
    bad = weights[name].clone()
    bad.view(-1)[3] = value
    return {**weights, name: bad}

def engine(weights=weights, dtype="float16", policy="streaming", **options):
    return Engine(weights, config=config, ring=RingConfig(40, 8, policy), dtype=dtype, **options)

for dtype in ("float16", "bfloat16", "float32", "float64"):
    running = engine(dtype=dtype)
    before = running.score(range(60))
    for part, name in NAMES.items():
        for value in (float("nan"), float("inf"), float("-inf")):
            bad = with_one(name, value)
            tried(f"{part} {value} loaded in {dtype}", lambda: engine(bad, dtype) and "taken")
            tried(f"{part} {value} taken over in {dtype}", lambda: running.update_weights(bad) or "taken")
    outcomes[f"left in {dtype}"] = torch.equal(running.score(range(60)), before)

running = engine()
before = running.score(range(60))
name = "model.layers.2.mlp.down_proj.weight"
freed = weights[name].clone()
freed.untyped_storage().resize_(0)
kinds = {
    "coo": weights[name].to_sparse(), "csr": weights[name].to_sparse_csr(), "mkldnn": weights[name].to_mkldnn(),
    "freed": freed, "none": None, "meta": weights[name].to("meta"),
    "nested": torch.nested.nested_tensor([*weights[name]]),
}
for kind, tensor in kinds.items():
    tried(f"a tensor that is {kind}", lambda: running.update_weights({**weights, name: tensor}) or "taken")
outcomes["left"] = torch.equal(running.score(range(60)), before)

for ending in ("x", {}, [1, "x"], 1.5, True, -1):
    tried(f"ending {ending!r}", lambda: engine(generation_config={"eos_token_id": ending}) and "taken")

@dataclasses.dataclass(frozen=True)
class Odd(Policy):
    name = "odd"
    observed: str = ""
    slot_state = ("looks",)

    def observe(self, live):
        return {"": {}, "none": None, "list": [1], "text": {"looks": "x"}}[self.observed]

    def priority(self, live):
        nan = (live.seed[:, None, None] == 1) & (live.eviction[:, None, None] >= 2)
        return torch.where(nan, torch.nan, live.position[..., : live.candidates].float())

for backend in ("torch", "native"):
    odd = engine(dtype="float32", policy=Odd(), backend=backend, lanes=3)
    params = [SamplingParams(seed=seed, max_tokens=100, ignore_eos=True) for seed in (0, 1, 2)]
    done = odd.generate([[1, 2, 3]] * 3, params)
    alone = [odd.generate([1, 2, 3], each) for each in params]
    outcomes[f"NaN on {backend}"] = [[each.finish_reason, each.error, each.completion_tokens] for each in done]
    outcomes[f"alone on {backend}"] = [one.token_ids == other.token_ids for one, other in zip(done, alone)]
    tried(f"score on {backend}", lambda: odd.score(range(90), seeds=[1]).tolist())
    tried(f"score of another seed on {backend}", lambda: len(odd.score(range(90), seeds=[2])))
for kind in ("none", "list", "text"):
    tried(f"observe {kind}", lambda: engine(policy=Odd(kind)).generate([1, 2], SamplingParams(max_tokens=90)).text)

from ringkv.engine.ring.integrity import check_integrity
running = engine(lanes=2)
[event] = running.stream(list(range(50)), on_prefill=lambda done, layers: running.cancel(0))
outcomes["cancelled"] = event.completion.finish_reason
tried("integrity", lambda: check_integrity(running.ring))
"""

TOKENIZERS = r"""
import base64, os, struct, time
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tiny import tiny_config, tiny_weights
from ringkv.engine.text.encoding import Conversation
from ringkv.engine.text.templates import ChatTemplate
from ringkv.models.checkpoints.gguf import GGUFCheckpoint
from ringkv.models.checkpoints.gguf_tokenizer import _pre_tokenizer
from ringkv.models.tokenizer import Tokenizer

def byte_level(extra=None, pre="qwen2"):
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary | (extra or {}), []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_pre_tokenizer(pre))
    backend.decoder = decoders.ByteLevel()
    return backend

def spent():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

# A panic, which is no Exception.
blanks = " " * 11_000_000
tokenizer = Tokenizer(byte_level())
tried("panic", lambda: len(tokenizer.encode(blanks)))
config = tiny_config(vocab_size=300)
engine = Engine(tiny_weights(config, torch.float32), tokenizer, config=config, ring=RingConfig(40, 8))
done = engine.generate(["one", blanks, "two"], SamplingParams(max_tokens=3), raw=True)
outcomes["rows"] = [[each.finish_reason, each.error and each.error["type"]] for each in done]

def opened(name, tokenizer=None, sparse=None, **files):
    folder = Path(name)
    folder.mkdir()
    description = json.loads(byte_level().to_str()) | (tokenizer or {})
    (folder / "tokenizer.json").write_text(json.dumps(description))
    for file, content in files.items():
        (folder / file.replace("__", ".")).write_text(json.dumps(content))
    if sparse is not None:
        with (folder / sparse).open("wb") as file:
            file.truncate(4 << 30)
    begun = spent()
    tried(name, lambda: len(Tokenizer.from_folder(folder).encode("a")))
    outcomes[name] = [outcomes[name], spent() - begun]

def added(*texts):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    numbered = enumerate(texts, 256)
    return {"added_tokens": [{"id": id, "content": text, "special": True, **flags} for id, text in numbered]}

def steps(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}

def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}

table = (4).to_bytes(4, "little") + bytes(4) + b"x" * 9999 + bytes(1)
precompiled = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
piece, frame = [{"SpecialToken": {"id": "s", "type_id": 0}}], {"id": "s", "ids": [0] * 9999, "tokens": ["a"] * 9999}
opened("long", added(*("x" * 100_000 + str(at) for at in range(9))))
opened("long in the configuration", tokenizer_config__json={"extra_special_tokens": ["x" * 30_000]})
opened("many", added(*(f"<{at}>" for at in range(20_000))))
opened("characters", added(*(f"<{at}>".rjust(200, "x") for at in range(4000))))
opened("hole", {"model": {"type": "BPE", "vocab": {"a": 0, "b": (1 << 24) - 2}, "merges": []}})
opened("doubling", steps(*[replace("a", "aa")] * 40))
opened("between", steps(*[replace("", "a", "Regex")] * 40))
opened("compatible", steps(*[replace("a", "\ufdfa"), {"type": "NFKC"}] * 9))
opened("nested", steps(steps(*[{"type": "Prepend", "prepend": "a" * 99}] * 9)["normalizer"]))
opened("table", steps(precompiled))
opened("frame", {"post_processor": {"type": "TemplateProcessing", "single": piece * 9999, "pair": piece,
                                    "special_tokens": {"s": frame}}})
for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json"):
    opened(f"sparse {file}", sparse=file)
# What is as large as what is published is read.
opened("real", added(*(f"<|reserved_special_token_{at}|>" for at in range(6000))) | steps(
    replace(" ", "\u2581"), {"type": "NFKC"}, {"type": "Lowercase"}, replace(" {2,}", "\u2581", "Regex")))
real = Tokenizer.from_folder(Path("real"))
template = ChatTemplate("{% for m in messages %}<|reserved_special_token_1|>{{ m.content }}{% endfor %}", {})
talk = [{"role": "user", "content": "Hello <|reserved_special_token_2|>"}]
ids = Conversation(real, template, talk).ids
begun = spent()
outcomes["conversation"] = [Conversation(real, template, talk).ids == ids, spent() - begun]

def text(value):
    return struct.pack("<Q", len(value)) + value.encode()

def gguf(name, pairs=b"", count=0, tensors=(), size=None):
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + pairs
    for each, rows, at in tensors:
        data += text(each) + struct.pack("<IQQIQ", 2, 256, rows, 0, at)
    path = Path(f"{name}.gguf".replace(" ", "-"))
    path.write_bytes(data + bytes(-len(data) % 32))
    os.truncate(path, size or len(data) + 4 * 256 * 64 + 64)
    begun = spent()
    tried(name, lambda: GGUFCheckpoint(path) and "taken")
    outcomes[name] = [outcomes[name], spent() - begun]

gguf("overlap", tensors=[(f"blk.{at}.ffn_up.weight", 60, 32 * at) for at in range(64)])
gguf("long text", text("a") + struct.pack("<IQ", 8, 3 << 30), 1, size=4 << 30)
arrays = b"".join(text(f"a{at}") + struct.pack("<IIQ", 9, 0, 1 << 24) + bytes(1 << 24) for at in range(1))
gguf("long array", arrays + text("b") + struct.pack("<IIQ", 9, 12, 1 << 24), 2, size=4 << 30)
gguf("many pairs", count=1 << 24, size=4 << 30)
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return run_bounded(WEIGHTS, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return run_bounded(TOKENIZERS, tmp_path_factory.mktemp("texts"), memory=5 << 29)


PARTS = {
    "embedding": "model.embed_tokens.weight",
    "product": "model.layers.1.self_attn.k_proj.weight",
    "norm": "model.layers.2.input_layernorm.weight",
    "bias": "model.layers.0.self_attn.q_proj.bias",
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_is_not_finite_is_refused_by_its_name(dtype, weights):
    for part, name in PARTS.items():
        for value, told in (("nan", "NaN"), ("inf", "infinity"), ("-inf", "infinity")):
            for way in ("loaded", "taken over"):
                message = weights[f"{part} {value} {way} in {dtype}"]
                assert re.fullmatch(f"RingkvError: .*tensor '{name}' holds {told}.*finite numbers.*", message)
    assert weights[f"left in {dtype}"]


def test_tensors_that_cannot_be_copied_leave_the_old_ones(weights):
    for kind in ("coo", "csr", "mkldnn", "none", "meta", "nested", "freed"):
        message = weights[f"a tensor that is {kind}"]
        assert re.match("RingkvError: state dict: .*down_proj", message.partition("\n")[0]), message
        assert "\n" not in message
    assert weights["left"]


@pytest.mark.parametrize("ending", ["x", {}, [1, "x"], 1.5, True, -1])
def test_endings_that_are_no_ids(ending, weights):
    message = weights[f"ending {ending!r}"]
    assert message.startswith(f"RingkvError: generation_config.json: eos_token_id = {ending!r}: accepted is")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_nan_of_a_policy_ends_its_request_by_name(backend, weights):
    told = "policy odd: priority returned NaN, accepted are numbers, and infinity"
    fine, bad, other = weights[f"NaN on {backend}"]
    assert fine == other == ["length", None, 100]
    # 48 slots are full once 45 tokens are read, and again with the 53rd. The step that read it drew one more token.
    assert bad == ["error", {"type": "RingkvError", "message": told}, 54]
    assert weights[f"alone on {backend}"] == [True] * 3
    assert weights[f"score on {backend}"] == f"RingkvError: {told}"
    assert weights[f"score of another seed on {backend}"] == 1


def test_what_observe_returns_is_named(weights):
    told = "RingkvError: policy odd: observe"
    assert weights["observe none"] == f"{told} returned NoneType, accepted is a mapping"
    assert weights["observe list"] == f"{told} returned list, accepted is a mapping"
    assert weights["observe text"].startswith(f"{told} gave looks as str, accepted is float32")


def test_a_prompt_that_was_left_breaks_no_invariant(weights):
    assert weights["cancelled"] == "cancelled"
    assert weights["integrity"] is None


def test_a_panic_is_the_error_of_its_row(texts):
    assert re.match("RingkvError: text of 11000000 characters: the tokenizer fails on it: ", texts["panic"])
    assert texts["rows"] == [["length", None], ["error", "RingkvError"], ["length", None]]


@pytest.mark.parametrize(
    "name, told",
    [
        ("long", "added_tokens: 'xxx.* has 100001 characters: accepted are added tokens of up to 256"),
        ("long in the configuration", "beside tokenizer.json: 'xxx.* has 30000 characters"),
        ("many", "added_tokens: 20000 added tokens of .*accepted are up to 8192"),
        ("characters", "added_tokens: 4000 added tokens of 800000 characters"),
        ("hole", "id 16777214: accepted are ids below 65538 for 2 tokens"),
        ("doubling", r"growth .* = 1099511627776.*up to 4096 times"),
        ("between", "growth of a text under its normalizer = "),
        ("compatible", "growth of a text under its normalizer = 198359290368"),
        ("nested", "growth of a text under its normalizer = 1000000000000000000"),
        ("table", "growth of a text under its normalizer = 9999"),
        ("frame", "tokens that post_processor puts around a text = 99980001: accepted is up to 65536"),
        ("sparse tokenizer.json", "tokenizer.json: holds 4294967296 bytes: accepted is a file of up to 67108864"),
        ("sparse tokenizer_config.json", "tokenizer_config.json: holds 4294967296 bytes"),
        ("sparse chat_template.jinja", "chat_template.jinja: holds 4294967296 bytes"),
        ("sparse added_tokens.json", "added_tokens.json: holds 4294967296 bytes"),
        ("overlap", "broken GGUF file: the tensors 'blk.0.ffn_up.weight' and 'blk.1.ffn_up.weight' overlap"),
        ("long text", "it ends inside its header, which is longer than 67108864 bytes"),
        ("long array", "it ends inside its header, which is longer than 67108864 bytes"),
        ("many pairs", "broken GGUF file: it holds '' twice"),
    ],
)
def test_bombs_are_refused_by_name(name, told, texts):
    message, seconds = texts[name]
    assert re.match(f"RingkvError: .*{told}", message), message
    assert len(message) < 600
    assert "\n" not in message
    assert seconds < 5


def test_what_is_published_is_read(texts):
    assert texts["real"][0] == 1
    same, seconds = texts["conversation"]
    assert same
    assert seconds < 1
