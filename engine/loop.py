"""The loop: the requests of all callers share the lanes, which step together; one that ends is refilled at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from ringkv.engine.call import Call, Seat, Step
from ringkv.engine.completion import Completion, StreamEvent
from ringkv.engine.policies import gave_nan
from ringkv.engine.record import Recorder
from ringkv.engine.request import Generation, Request
from ringkv.engine.runner import UNRANKED, Drawn, Progress, Runner
from ringkv.engine.snapshot import LOGITS, Snapshot
from ringkv.errors import RingkvError


class Cancelled(Exception):
    """Raised inside a prefill to leave it."""


class Loop:
    """Serves calls with the lanes of a runner. One thread at a time takes a turn; ``Serving`` sees to that.

    The host may read a step's tokens after it has launched the next ones (``runner.latency``). What it decides late
    acts late: the surplus token of a request that has ended is dropped.

    Calls that wait are served in turn, a prompt each. A turn may be left by an exception at any point. The next one
    then finds that it was not finished, stops every lane on the device, and fails what ran; what waits goes on.

    Args:
        runner: prefills and steps.
        start: makes the generation of a request.
        report: makes the completion of a generation that has ended.
        snapshot: makes the snapshot of a generation, from a copy of what its lane holds.
        check_room: refuses a prompt of so many tokens that there is no memory to read.
    """

    def __init__(
        self,
        runner: Runner,
        start: Callable[[Request, int], Generation],
        report: Callable[[Generation, Recorder | None, Snapshot | None], Completion],
        snapshot: Callable[[Generation, dict[str, Tensor]], Snapshot],
        check_room: Callable[[int], None],
    ) -> None:
        self.runner, self.ring, self.start, self.report = runner, runner.ring, start, report
        self.snapshot, self.check_room = snapshot, check_room
        self.arrived: deque[Call] = deque()  # any thread may put a call in
        self.calls: list[Call] = []  # those that have not ended
        self.running: dict[int, Seat] = {}
        self.flying: deque[Step] = deque()
        self.closing = False  # any thread may set it: all that runs is cancelled
        self._recorders: list[Recorder] = []  # of calls, among the ring's observers
        self._broken: BaseException | bool = False  # whether a turn was begun and not finished, and by what it was left
        self._last = 0  # in ``calls``, who was served last

    def turn(self, admit: bool = True) -> None:
        """Read a prompt into a free lane, or else let every lane read a token, and hand out what comes of it.

        Args:
            admit: whether prompts are read.
        """
        self.tidy()
        self._broken = True
        try:
            if not (admit and self._admit()) and ((launched := self._launch()) or self.flying):
                self._collect(launched)
        except BaseException as error:
            self._broken = error
            raise
        self._broken = False

    def tidy(self) -> None:
        """Drop what belongs to calls that are not open, and end those of which nothing is left."""
        if self._broken:
            self._recover()
        while self.arrived:  # in both for a moment, so that no interrupt loses it
            self.calls.append(self.arrived[0])
            self.arrived.popleft()
        # Asked once: a call that is closed meanwhile goes next time, with its lanes.
        calls = [call for call in dict.fromkeys(self.calls) if call.open.locked()]
        for lane, seat in list(self.running.items()):
            if seat.call not in calls or seat.call.error is not None:
                self.ring.stop(lane)
                del self.running[lane]
        busy = {id(seat.call) for seat in self.running.values()}
        for call in calls:
            if call.exhausted and id(call) not in busy and not call.ended:
                call.ended = True
                call.notify()
        self.calls = [call for call in calls if not call.ended]
        recorders = [call.recorder for call in self.calls if call.recorder is not None]
        if recorders != self._recorders:
            others = [observer for observer in self.ring.observers if observer not in self._recorders]
            self.ring.observers, self._recorders = [*others, *recorders], recorders
        if not self.running:
            self._forget_steps()

    def close(self) -> None:
        """Cancel what runs. A call of which more was to come ends with an error."""
        for seat in list(self.running.values()):
            seat.generation.cancel()
            self._serve(seat, seat.generation.flush())
        self.ring.stop_all()
        self.running.clear()
        for call in (*self.calls, *self.arrived):
            call.fetch()
            if not call.exhausted:
                call.fail(RingkvError("engine: it is closed"))
        self.tidy()

    def _recover(self) -> None:
        """After a turn that was left by an exception: the ring may hold half a step, so nothing that ran can go on."""
        self.ring.stop_all()
        self._forget_steps()
        kind, message = "Interrupted", "another call was interrupted in the middle of a step of this one"
        if isinstance(self._broken, Exception):
            kind, message = type(self._broken).__name__, " ".join(str(self._broken).split())
        for lane, seat in list(self.running.items()):
            seat.generation.fail(kind, message)
            seat.generation.retained = []  # no trace: the tables may be half written
            self._serve(seat)
            del self.running[lane]
        self._broken = False

    def _forget_steps(self) -> None:
        self.runner.drain()
        self.flying.clear()

    def _admit(self) -> bool:
        """Prepare or read the next prompt, of the next call that has one; returns whether there was any."""
        if len(self.running) >= self.ring.lanes:
            return False
        for _ in self.calls:
            self._last = (self._last + 1) % len(self.calls)
            call = self.calls[self._last]
            if call.fetch():
                if call.coming:  # else it was refused
                    self._read_prompt(call)
                return True
        return False

    def _read_prompt(self, call: Call) -> None:
        """Prefill the next request; samples of the same prompt that find a free lane are copies of it."""
        request = call.coming[0]
        first = self._sit(call)
        lane, generation = first.generation.lane, first.generation

        def progress(done: int, layers: int) -> None:
            if self._to_end(call, request):
                raise Cancelled
            if call.on_prefill is not None:
                try:
                    call.on_prefill(done, layers)
                except Exception as error:
                    call.fail(error)
                    raise Cancelled from error

        logits = None
        try:
            if self._to_end(call, request):
                raise Cancelled
            if generation.error is None:
                logits = self._fill(lane, request, progress)
        except Cancelled:
            generation.cancel()
        except (MemoryError, RuntimeError) as error:  # before it was read, or while it was
            if not _out_of_memory(error):
                raise
            generation.fail(type(error).__name__, " ".join(str(error).split()))
        if generation.error is not None or generation.finish_reason == "cancelled":
            self._serve(first, generation.flush())
            self._stand_up(first)
            return
        wave = [first]
        while call.coming and call.coming[0].ids is request.ids and len(self.running) < self.ring.lanes:
            mate = self._sit(call)
            self.ring.copy_lane(lane, mate.generation.lane, mate.generation.request.sample)
            wave.append(mate)
        past = request.past
        retained = self.ring.counts[:, lane].tolist() if past is None else past.snapshot.retained
        for seat in wave:
            seat.generation.retained = retained
            self._prepare(seat.generation)
            if request.reads:
                seat.generation.finish_reason = "length"
            if seat.generation.finish_reason is not None:  # it had ended before
                self._hand_out(seat, self._step(), logits=logits)
            elif logits is not None:
                opens = not seat.generation.tokens
                self._take(seat, self.runner.first(seat.generation.lane, logits, opens), 0, self._step())

    def _fill(self, lane: int, request: Request, progress: Progress) -> Tensor | None:
        """Read a prompt, or take up what a snapshot holds; the logits of the token that was read last, unless the next
        one is drawn already."""
        past = request.past
        self.check_room(len(request.ids) if past is None else 0)  # tokens that follow a snapshot are read one by one
        if past is None:
            self.ring.reset(lane, request.seed, request.sample, request.pin)
            return self.runner.prefill(lane, request.ids, progress)
        held = past.snapshot.lane
        self.runner.put(lane, held, request.seed, request.sample)
        if past.feed:
            return self.runner.read(lane, past.feed, progress)
        return held[LOGITS].to(self.ring.k.device) if LOGITS in held else None

    def _sit(self, call: Call) -> Seat:
        """Give the next request of a call a lane."""
        lane = next(lane for lane in range(self.ring.lanes) if lane not in self.running)
        seat = Seat(call, self.start(call.coming[0], lane))
        self.running[lane] = seat
        call.coming.popleft()
        return seat

    def _stand_up(self, seat: Seat) -> None:
        lane = seat.generation.lane
        self.ring.stop(lane)
        del self.running[lane]

    def _to_end(self, call: Call, request: Request) -> bool:
        """Whether somebody wants a request to end."""
        return self.closing or request.index in call.cancelled or not call.open.locked()

    def _prepare(self, generation: Generation) -> None:
        request, lane = generation.request, generation.lane
        values, steering, past = request.sampling.values, self.runner.steering, request.past
        ending = request.stop_ids if values["min_tokens"] else ()
        self.runner.sampler.set(lane, request.sampling, request.ids, ending, generation.tokens)
        budget, message = values["max_thinking_tokens"], request.closing_message
        if past is None or not past.tokens:
            steering.set(lane, request.inside_thought, budget, message)
        else:  # a sample of it may have come by ``copy_lane``, which knows the ring alone
            steering.put(lane, past.snapshot.lane)
            if past.changed:
                left = -1 if budget is None else max(0, budget - generation.counts()[0])
                steering.change(lane, generation.phase, left, message)

    def _step(self) -> Step:
        ring = self.ring
        return Step(dict(self.running), ring.counts.copy(), ring.evicted.copy(), ring.spans.copy())

    def _launch(self) -> bool:
        """Launch a step, unless every running lane already has as many tokens on the way as it may still take.

        None is launched either before a snapshot is taken of what the last one has left.
        """
        wanted = False
        for lane, seat in self.running.items():
            coming = sum(step.seats.get(lane) is seat for step in self.flying)
            if seat.generation.room <= coming:
                self.ring.stop(lane)
            wanted |= coming > 0 and (seat.call.keep.last or seat.due(coming))
        if wanted or not self.ring.running:
            return False
        self.runner.launch()
        self.flying.append(self._step())
        return True

    def _collect(self, launched: bool) -> None:
        """Read the tokens of steps until no more than the runner's latency are on the way."""
        allowed = self.runner.latency if launched and self.ring.running else 0
        while len(self.flying) > allowed:
            drawn = self.runner.collect()
            step = self.flying.popleft()
            for lane, seat in step.seats.items():
                if self.running.get(lane) is seat:
                    self._take(seat, drawn, lane, step)

    def _take(self, seat: Seat, drawn: Drawn, row: int, step: Step) -> None:
        """Account for a drawn token; a generation that ends leaves its lane."""
        generation = seat.generation
        lane, token = generation.lane, drawn.tokens[row]
        pieces: list[tuple[str, str]] = []
        ids: list[int] = []
        to_end = self._to_end(seat.call, generation.request)
        if to_end and not seat.call.keep.last:
            generation.cancel()
            pieces = generation.flush()
        elif token == UNRANKED:
            generation.fail("RingkvError", str(gave_nan(self.ring.policy)))
            pieces = generation.flush()
        else:
            wanted = generation.request.sampling.values["logprobs"]
            logprob = None if wanted is None else drawn.logprob(row, wanted)
            forced = drawn.forced is not None and drawn.forced[row]
            pieces, ids = generation.push(token, forced, logprob), [token] if token >= 0 else []
            if to_end and generation.finish_reason is None:  # with the token: the lane's state is after it
                generation.cancel()
                pieces += generation.flush()
        if generation.close_thought:
            generation.close_thought = False
            self.runner.steering.close(lane, behind=len(self.flying))
        self._hand_out(seat, step, pieces, ids)

    def _hand_out(
        self,
        seat: Seat,
        step: Step,
        pieces: Sequence[tuple[str, str]] = (),
        ids: Sequence[int] = (),
        logits: Tensor | None = None,
    ) -> None:
        """Hand out what a step did to a request; one that has ended leaves its lane.

        Args:
            logits: of a request whose next token is not drawn yet.
        """
        generation, keep, snapshot = seat.generation, seat.call.keep, None
        lane, ended = generation.lane, generation.finish_reason is not None
        if ended:
            generation.figures = {
                "kept": int(step.counts[:, lane].max()),
                "evictions": int(step.evicted[:, lane].max()),
                "evictions_per_layer": step.evicted[:, lane].tolist(),
                "peak_slots": int(step.spans[:, lane].max()),
            }
        if generation.error is None and (keep.last if ended else seat.due()):
            held = {name: own.clone() for name, own in self.runner.lane(lane).items()}
            if logits is not None:
                held[LOGITS] = logits.clone()
            snapshot = self.snapshot(generation, held)
        self._serve(seat, pieces, ids, snapshot)
        if ended:
            self._stand_up(seat)

    def _serve(
        self,
        seat: Seat,
        pieces: Sequence[tuple[str, str]] = (),
        ids: Sequence[int] = (),
        snapshot: Snapshot | None = None,
    ) -> None:
        """Hand out what a token did: an event a piece of text, the last one with the completion where it is the end."""
        generation = seat.generation
        ended = generation.finish_reason is not None
        done = self.report(generation, seat.call.recorder, snapshot) if ended else None
        shown = len(pieces) - (generation.flushed if ended else 0)
        pieces = pieces or [(generation.channel, "")]
        for place, (channel, text) in enumerate(pieces):
            last = place == len(pieces) - 1
            event = StreamEvent(
                text=text,
                channel=channel,
                token_ids=[] if place else list(ids),
                completion=done if last else None,
                held=ended and bool(text) and place >= shown,
                snapshot=snapshot if last else None,
            )
            seat.call.serve(generation.request.index, event)


def _out_of_memory(error: BaseException) -> bool:
    """Whether this is memory that ran out: torch says so in a class on CUDA and in words on a CPU."""
    return isinstance(error, MemoryError) or "memory" in str(error).lower()
