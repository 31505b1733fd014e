"""Text to ids and back, and what a checkpoint says of its control tokens."""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from ringkv.errors import RingkvError
from ringkv.models.bounds import MOST_HOLES, check_tokenizer
from ringkv.models.keys import read_bytes, read_json, refusal
from ringkv.models.special_tokens import add_named_tokens, optional_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"
_LONG = 1 << 16  # characters from which a text takes long enough for other threads to miss their turn

# The files in which tokenizers of other kinds keep their vocabulary.
VOCABULARIES = (
    *("tekken.json", "tokenizer.model*", "spiece.model", "sentencepiece*.model", "tiktoken.model", "*.tiktoken"),
    *("vocab.json", "vocab.txt"),
)

# The byte that each character of byte-level BPE stands for: its own, or, from 256 on, the next that is not printable.
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE = [byte for byte in range(256) if chr(byte) in _ALPHABET]
_HIDDEN = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_HIDDEN)}


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """RingkvError for whatever the tokenizers library raises in the block, panics of its Rust code included.

    Args:
        what: what the message says of it.
    """
    try:
        yield
    except RingkvError:
        raise
    except BaseException as error:  # a panic is no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise RingkvError(f"{what}: {' '.join(str(error).split())}") from error
        raise


class Tokenizer:
    """A ``tokenizers.Tokenizer``, byte-level, with SentencePiece's spaces or of whole words, and its control tokens.

    A control token is an added token, special or not, that is never parsed in a text said to be plain. Added tokens
    of one character or of blanks only are words that the vocabulary lacked, and are parsed everywhere.

    Args:
        backend: used as it is, but that truncation and padding are switched off.
        special_tokens: texts by name (``bos_token``, ``eos_token``, ...), as chat templates know them.
        chat_template: the source of the jinja template, if there is one.
        add_bos: whether a text begins with BOS; None: if the backend's post-processor says so.
        eos_ids: what ends a text; None: the id of ``eos_token``.

    Attributes:
        bos_id: None where there is none.
        special_ids: ids whose text is not shown: the added tokens that are special.
        control_tokens: the ids of the control tokens by their texts.
        drops_space: whether the first space of a decoded text is not part of it (SentencePiece, words).
        size: one more than the largest id; a model's ids from it on are padding.
        holes: the ids below ``size`` that no token has, or one without text: they decode to nothing.

    Raises:
        RingkvError: the backend's decoder is of another kind, an id is absurd, or the library fails. So does every
            method on a text that the library fails on.
    """

    @refusing("tokenizer: it fails")
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        add_bos: bool | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._kind, self._byte_tokens, self.drops_space = _decoding(backend)
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_id = self.token_to_id(self.special_tokens.get("bos_token", ""))
        self.add_bos = self._begins_with_bos() if add_bos is None else add_bos
        eos_id = self.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = tuple(eos_ids) if eos_ids is not None else () if eos_id is None else (eos_id,)
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        control = (pair for pair in self._added.items() if pair[1].special or len(pair[1].content.strip()) > 1)
        self.control_tokens = {token.content: id for id, token in control}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        if self.size > (most := len(vocabulary) + MOST_HOLES):
            raise RingkvError(
                f"tokenizer: id {self.size - 1}: accepted are ids below {most} for {len(vocabulary)} tokens"
            )
        self.holes = frozenset(range(self.size)).difference(id for text, id in vocabulary.items() if text)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder: ``tokenizer.json``, and the control tokens that are named beside it
        (see ``add_named_tokens``); None where the folder has no tokenizer.

        The chat template comes from ``chat_template.jinja``, then ``tokenizer_config.json``, as in transformers, then
        ``chat_template.json``.

        Raises:
            RingkvError: a file is broken, or there is a vocabulary without ``tokenizer.json``.
        """
        if not (path := folder / "tokenizer.json").is_file():
            found = sorted({file.name for pattern in VOCABULARIES for file in folder.glob(pattern)})
            if found:
                raise RingkvError(
                    f"{folder}: {', '.join(found)} without tokenizer.json, the only tokenizer that is read; "
                    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes it"
                )
            return None
        with refusing(f"{path}: not a tokenizer"):
            check_tokenizer(read_json(path), str(path))
            backend = tokenizers.Tokenizer.from_buffer(read_bytes(path))
            special_tokens = add_named_tokens(backend, folder)
        return cls(backend, special_tokens=special_tokens, chat_template=_chat_template(folder))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its exact text in the vocabulary; None where there is no such token."""
        try:
            id: int | None = self._backend.token_to_id(token)
        except UnicodeEncodeError:  # half a surrogate pair, which no vocabulary holds
            return None
        return id

    def encode(self, text: str, *, control: bool = True, bos: bool = False) -> list[int]:
        """The ids of a text; ``bos`` puts BOS in front where the tokenizer adds one and the text has none.

        Args:
            control: whether control tokens in the text are parsed; otherwise they are text like any other.

        Raises:
            RingkvError: the text holds half a surrogate pair.
        """
        ids: list[int] = self._encoding(self._backend, text).ids if control else self.encode_parts([text])
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """The ids of a text whose control tokens are known: plain texts, never parsed for any, and ids between them.

        The same ids as ``encode`` gives for the joined text, where no plain text holds a control token. So a token
        that the tokenizer would not find where it stands (a normaliser puts a blank before it) is text there, too.

        Raises:
            RingkvError: a text holds half a surrogate pair, or its words alone give a control token.
        """
        return self._encoded(list(parts))[0]

    def count_before(self, parts: Sequence[str | int], index: int) -> int:
        """How many ids of ``encode_parts`` begin before the part with this index."""
        _, starts, borders = self._encoded(list(parts))
        return bisect_left(starts, borders[index])

    def _encoded(self, parts: list[str | int]) -> tuple[list[int], list[int], list[int]]:
        """The ids of ``encode_parts``, where each begins, and where each part does and the last one ends."""
        plain, names, ours = self._plain
        pieces = [part if isinstance(part, str) else names[part] for part in parts]
        borders = list(accumulate(map(len, pieces), initial=0))
        encoding = self._encoding(plain, "".join(pieces))
        found = [span for id, span in zip(encoding.ids, encoding.offsets, strict=True) if ours.get(id) in names]
        if len(found) < sum(isinstance(part, int) for part in parts):
            reached = {at for span in found for at in range(*span)}
            missed = [reached.isdisjoint(range(*span)) for span in pairwise(borders)]
            told = zip(parts, missed, strict=True)
            return self._encoded(
                [self._added[part].content if isinstance(part, int) and miss else part for part, miss in told]
            )
        for id in set(self.control_tokens.values()).intersection(encoding.ids) - ours.keys():
            raise RingkvError(f"text: the tokenizer makes the control token {self._added[id].content!r} of plain text")
        return [ours.get(id, id) for id in encoding.ids], [start for start, _ in encoding.offsets], borders

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to the text; empty for an id that is none."""
        added = self._added.get(id)
        token: str | None = self._backend.id_to_token(id) if added is None else added.content
        if token is None:
            return b""
        if self._kind == "words":
            return f" {token}".encode()
        if added is not None:
            return token.encode()
        if self._kind == "bytes":
            known = all(character in _BYTES for character in token)
            return bytes(_BYTES[character] for character in token) if known else token.encode()
        if self._byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(_SPACE, " ").encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without the special ones; bytes that are not UTF-8 become U+FFFD."""
        text = b"".join(self.token_bytes(id) for id in ids if id not in self.special_ids).decode(errors="replace")
        return text.removeprefix(" ") if self.drops_space else text

    def _encoding(self, backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        with refusing(f"text of {len(text)} characters: the tokenizer fails on it"):
            try:
                if len(text) < _LONG:
                    return backend.encode(text, add_special_tokens=False)
                return backend.encode_batch([text], add_special_tokens=False)[0]  # it alone lets them run
            except TypeError as error:
                raise RingkvError("text: it holds half a surrogate pair, which is not valid Unicode") from error

    def _begins_with_bos(self) -> bool:
        return self.bos_id is not None and self._backend.encode("a").ids[:1] == [self.bos_id]

    @cached_property
    @refusing("tokenizer: it fails")
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int | None, int]]:
        """A tokenizer that knows the control tokens by secret names only; these names by id; its added ids to ours.

        So a text can hold both: control tokens under their secret names, and texts that merely look like them. The
        words between are cut where the first tokenizer cuts them, since the names are found as the tokens are, and
        are as greedy for blanks.
        """
        plain = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        words = self._backend.get_vocab(with_added_tokens=False)
        nonce = secrets.token_hex(8)
        names = {id: f"\U0010fffd{nonce}:{id}\U0010fffd" for id in self.control_tokens.values()}
        texts = {id: names.get(id, token.content) for id, token in sorted(self._added.items())}
        # New ids count on from the number of words, which is no free id where the vocabulary has holes.
        holes = max(words.values(), default=-1) + 1 - len(words)
        plain.add_tokens([f"\U0010fffd{nonce}-{hole}\U0010fffd" for hole in range(holes)])
        fields = {id: {**token.__getstate__(), "special": False} for id, token in self._added.items()}
        plain.add_tokens([AddedToken(**{**fields[id], "content": text}) for id, text in texts.items()])
        return plain, names, {plain.token_to_id(text): id for id, text in texts.items()}


def _decoding(backend: tokenizers.Tokenizer) -> tuple[str, bool, bool]:
    """What tokens are (bytes; spaces: texts with SentencePiece's; words, which spaces join), whether some are single
    bytes, and whether a first space is dropped."""
    if backend.decoder is None:
        return "words", False, True
    decoder = json.loads(backend.decoder.__getstate__())
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        return "bytes", False, False
    spaces = "Metaspace" in steps or steps.get("Replace", {}).get("pattern") == {"String": _SPACE}
    if not spaces:
        raise RingkvError(
            f"tokenizer.json: decoder = {' + '.join(steps)}: accepted is ByteLevel, Metaspace, a Replace of {_SPACE}, "
            "or none"
        )
    drops = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    return "spaces", "ByteFallback" in steps, drops or steps.get("Strip", {}).get("start", 0) > 0


def _chat_template(folder: Path) -> str | None:
    if (path := folder / "chat_template.jinja").is_file():
        try:
            return read_bytes(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise RingkvError(f"{path}: cannot be read: {error}") from error
    sources = (optional_json(folder / name) for name in ("tokenizer_config.json", "chat_template.json"))
    template = next((source["chat_template"] for source in sources if source.get("chat_template") is not None), None)
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise refusal(f"{folder}: chat_template", template, "a text, or a list of texts with names")
    return template
