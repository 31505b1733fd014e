"""What a policy is, and the table of them."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ringkv.engine.policies.live import Live
from ringkv.engine.spec import build, parse_spec
from ringkv.errors import RingkvError
from ringkv.models.config import ModelConfig

MOST_FIELD = 1 << 10  # the largest width or rank of a policy
# A class of the user's own; the fields of a policy of the table have a "=" where its name ends.
_OWN = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)(:(?P<fields>.*))?", re.DOTALL)


class Policy:
    """Base of every policy: a frozen dataclass of hyperparameters with one method, ``priority``.

    A policy sees tensors of the live tokens and gives each candidate a number. What is protected (window, sinks, pins),
    the order of equals, and all writing to the ring belong to one routine that all policies share.

    A policy that must remember something between evictions declares it as state and returns the new values from
    ``observe`` or ``remember``; the ring allocates, counts, resets and copies it, and hands it out as ``live.state``.

    Attributes:
        name: what ``--policy`` and ``RingConfig`` call it, and results too.
        source: the paper.
        keeps: one line, what stays.
        evicts: False only for ``full``.
        slot_state: names of a float32 value for every slot, zeroed when a token is written to it. [P, H, n] in
            ``live.state``, in position order.
        lane_state: name -> the tensor that every (layer, lane) starts a request with. [P, ...] in ``live.state``. See
            ``start`` where it depends on the model.

    >>> import ringkv
    >>> @dataclasses.dataclass(frozen=True)
    ... class Oldest(Policy):
    ...     name = "oldest"
    ...
    ...     def priority(self, live):
    ...         return live.position[..., : live.candidates].float()
    >>> ringkv.RingConfig(budget=128, policy=Oldest()).policy
    Oldest()
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    evicts: ClassVar[bool] = True
    slot_state: ClassVar[tuple[str, ...]] = ()
    lane_state: ClassVar[Mapping[str, Tensor]] = {}

    @property
    def calibrated_for(self) -> str | None:
        """The digest of the only model that this serves; None is any. See ``ringkv.engine.calibration``."""
        return None

    def priority(self, live: Live) -> Tensor:
        """float32 [P, H, c]: one number a candidate, in position order; the lowest leave, of equals the older.

        Must not write anything and must not synchronise with the host. +inf keeps a candidate as long as others are
        left. NaN ends the request with an error that names the policy: it is noted on the device and read with a later
        token, so nothing waits for it, and the eviction at hand takes it for -inf.
        """
        raise NotImplementedError

    def observe(self, live: Live) -> Mapping[str, Tensor]:
        """New values of the declared state, all or some, in the shapes of ``live.state``.

        Called for policies with state only. At prefill once a layer: the live tokens and the queries are the whole
        prompt's, before retention. In decode whenever ``window`` queries are new, and before each eviction.
        """
        return {}

    def remember(self, live: Live) -> Mapping[str, Tensor]:
        """New values of the declared state at an eviction, as ``observe`` gives them; ``priority`` sees them then.

        Called once an eviction for policies with state. It counts as one where a prompt is ranked down to the budget:
        the live tokens are then those that retention let in, and the queries the prompt's last ``window``.
        """
        return {}

    def start(self, model: ModelConfig) -> Mapping[str, Tensor]:
        """The state that the lanes of each layer start a request with: name -> [L, ...].

        Called when a ring is made for a model, and where its size is planned.

        Raises:
            RingkvError: the policy cannot serve this model.
        """
        return {name: value.expand(model.layers, *value.shape) for name, value in self.lane_state.items()}


POLICIES: dict[str, type[Policy]] = {}


def register_policy(cls: type[Policy]) -> type[Policy]:
    """Class decorator: make a policy known by its ``name``.

    Raises:
        RingkvError: not a frozen dataclass derived from ``Policy``, or a name that is malformed or taken.

    >>> @register_policy
    ... @dataclasses.dataclass(frozen=True)
    ... class EveryOther(Policy):
    ...     name = "every-other"
    ...     step: int = 2
    ...
    ...     def priority(self, live):
    ...         return (live.position[..., : live.candidates] % self.step).float()
    >>> as_policy("every-other:step=3")
    EveryOther(step=3)
    """
    _check_class(cls, "below the decorator")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or any(mark in name for mark in ":,= "):
        raise RingkvError.bad(f"policy {cls.__name__}: name", name, "a text without ':', ',', '=' and spaces")
    known = POLICIES.get(name, cls)
    # The same class again (a notebook cell run twice) replaces the old one.
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RingkvError.bad(f"policy {cls.__name__}: name", name, "a name that is not taken")
    POLICIES[name] = cls
    return cls


def _check_class(cls: type, where: str) -> None:
    """Refuse a class whose objects would be no policies."""
    if not issubclass(cls, Policy):
        raise RingkvError(f"policy {cls.__name__}: must derive from ringkv.Policy")
    # The class's own: a plain subclass inherits its parent's, and its fields would not be fields.
    parameters = cls.__dict__.get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise RingkvError(f"policy {cls.__name__}: must be a frozen dataclass (@dataclass(frozen=True) {where})")


def as_policy(value: str | Policy) -> Policy:
    """A policy from its name, from ``"name:field=value,..."``, from ``"module:Class"``, or as it is.

    ``"module:Class:field=value,..."`` sets fields of a class of your own. The policy then goes by the name
    ``"module:Class"``, in results and messages, and the class need not be registered.

    Raises:
        RingkvError: what is not known, cannot be imported, or is no policy.
    """
    if isinstance(value, str):
        if (own := _OWN.fullmatch(value)) is not None and own["module"] not in POLICIES:
            return _imported(value, own["module"], own["name"], own["fields"] or "")
        return parse_spec("policy", value, POLICIES)
    if not isinstance(value, Policy) or not isinstance(getattr(value, "name", None), str):
        raise RingkvError.bad("policy", value, f"{', '.join(POLICIES)}, or an object of a Policy subclass with a name")
    return value


def _imported(given: str, module: str, name: str, fields: str) -> Policy:
    """The policy of a class that a module holds."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever a module may raise while it is imported
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        why = f"no module {module} is found" if missing else f"module {module} cannot be imported ({why})"
        raise RingkvError(f"policy = {given!r}: {why}; accepted is module:Class, or {', '.join(POLICIES)}") from error
    if not isinstance(found, type):
        raise RingkvError(f"policy = {given!r}: module {module} has no class {name}; accepted is the name of a policy")
    _check_class(found, "above the class")
    policy: Policy = build(f"policy {module}:{name}", found, fields)
    object.__setattr__(policy, "name", f"{module}:{name}")  # what finds it again, where its own name would not
    return policy


def policy_table() -> list[dict[str, Any]]:
    """Every policy by name, params (field -> default, or "required" where there is none), source and keeps."""

    def default(field: dataclasses.Field[Any]) -> Any:
        if field.default is not dataclasses.MISSING:
            return field.default
        return "required" if field.default_factory is dataclasses.MISSING else field.default_factory()

    return [
        {
            "name": name,
            "params": {field.name: default(field) for field in dataclasses.fields(cls)},  # type: ignore[arg-type]
            "source": cls.source,
            "keeps": cls.keeps,
        }
        for name, cls in POLICIES.items()
    ]


def priorities(policy: Policy, live: Live) -> Tensor:
    """``policy.priority``, its shape and dtype checked: float32 [P, H, c].

    Raises:
        RingkvError: naming the policy and what it returned.
    """
    priority = policy.priority(live)
    given, wanted = shown(priority), f"float32 {[*live.slot.shape[:2], live.candidates]}"
    if given != wanted:
        raise RingkvError(f"policy {policy.name}: priority returned {given}, accepted is {wanted}")
    return priority


def gave_nan(policy: Policy) -> RingkvError:
    """The error for a policy that returned NaN."""
    return RingkvError(f"policy {policy.name}: priority returned NaN, accepted are numbers, and infinity")


def shown(x: object) -> str:
    """The dtype and the shape of a tensor, or the type of something else."""
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__
