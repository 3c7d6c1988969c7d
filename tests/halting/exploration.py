"""Every interleaving of a small world: ranks, their sidecars, the coordinator and its journal, the wires between them, and the register.

At any moment any of these may happen: a message arrives or is lost, a patience is over, the register answers, a save ends well or not, a
main thread reaches the step, a sidecar, a rank or the coordinator dies, the coordinator is started again. Each is one transition.

A world is a tuple of small numbers: what they stand for is in `Pool`s, and each step of a table is worked out once.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from holter.halting import protocol, rank_protocol
from holter.halting.protocol import Course, Gone, HaltState, Heard, Tell
from holter.halting.rank_protocol import ENDS, Answered, Ask, Do, OrderArrived, Rank, Reached, Saved, Say, Stand
from holter.records import Order

STEP = 1
"""Before which the ranks are to stand."""
LATE = "the save was not over after 9 s"
"""Why any save of these worlds fails: other words would only make other worlds."""


@dataclass(frozen=True)
class Place:
    """One rank and what belongs to it."""

    rank: Rank
    is_past: bool = False
    """The main thread has gone on, past the step."""
    is_blocked: bool = False
    """In a collective that does not end."""
    offer: Order | None = None
    """What it asks the register."""
    has_part: bool = False
    """Its part of the checkpoint lies on the disk."""
    down: tuple[Order, ...] = ()
    up: tuple[Heard | Gone, ...] = ()


class World(NamedTuple):
    """Everything, at one moment; `places`, `halt` and `journal` are numbers of the explorer's pools."""

    places: tuple[int, ...]
    halt: int
    """-1: the coordinator has none."""
    is_up: bool
    """The coordinator lives."""
    journal: int
    standing: frozenset[int] = frozenset()
    """Ranks that the coordinator has heard to stand; in its journal as well."""
    register: int = -1
    sealed: frozenset[int] | None = None
    """The parts that were found when the checkpoint got its name."""
    losses: int = 0
    deaths: int = 0
    repeats: int = 0
    """How many more of these may happen."""


@dataclass(frozen=True)
class Scene:
    """Where a world begins, and what its coordinator wants."""

    places: tuple[Place, ...]
    order: Order
    """With which the halt begins."""
    must_stand: frozenset[int] = frozenset()
    """Ranks of which it must have been heard first that they stand."""
    is_nonfinite: bool = False
    """Ranks stand by themselves."""
    losses: int = 0
    deaths: int = 0
    repeats: int = 1
    rank_table: dict[Any, Any] = field(default_factory=lambda: rank_protocol.TABLE)
    table: dict[Any, Any] = field(default_factory=lambda: protocol.TABLE)


T = TypeVar("T", bound=Hashable)


class Pool(Generic[T]):
    """Things by number, equal ones by one."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, item: T) -> int:
        """Of this one, new or not."""
        known = self._numbers.setdefault(item, len(self.items))
        if known == len(self.items):
            self.items.append(item)
        return known


class Explorer:
    """Visits every world that can be reached, breadth first."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.places: Pool[Place] = Pool()
        self.halts: Pool[HaltState] = Pool()
        self.journals: Pool[tuple[Order, ...]] = Pool()
        self.orders: Pool[Order] = Pool()
        self._moves: dict[int, list[tuple[str, int]]] = {}
        self._told: dict[Any, Any] = {}
        self._everyone = range(len(scene.places))
        numbers = tuple(self.places.number(place) for place in scene.places)
        self.start = World(
            numbers, -1, True, self.journals.number(()), losses=scene.losses, deaths=scene.deaths, repeats=scene.repeats
        )

    def explore(self, check: Callable[["Explorer", World], None], limit: int = 2_000_000) -> int:
        """Check every world; returns how many there are."""
        seen, layer = {self.start}, [self.start]
        while layer:
            later = []
            for world in layer:
                check(self, world)
                for found in self.transitions(world):
                    if found not in seen:
                        seen.add(found)
                        later.append(found)
            assert len(seen) < limit, f"more than {limit} worlds"
            layer = later
        return len(seen)

    def transitions(self, world: World) -> Iterator[World]:
        """All that may happen next."""
        for number, place in enumerate(world.places):
            yield from self._of_rank(world, number, place)
            yield from self._of_wires(world, number, place)
        yield from self._of_coordinator(world)

    def place(self, world: World, number: int) -> Place:
        """One rank's."""
        return self.places.items[world.places[number]]

    def halt(self, world: World) -> HaltState | None:
        """The coordinator's."""
        return self.halts.items[world.halt] if world.halt >= 0 else None

    def _of_rank(self, world: World, number: int, index: int) -> Iterator[World]:
        moves = self._moves.get(index)
        if moves is None:
            found = self._local_moves(self.places.items[index])
            moves = self._moves[index] = [(kind, self.places.number(place)) for kind, place in found]
        for kind, after in moves:
            if kind != "death":
                yield _put(world, number, after)
            elif world.deaths:
                yield _put(world, number, after)._replace(deaths=world.deaths - 1)
        offer = self.places.items[index].offer
        if offer is not None:
            register = world.register if world.register >= 0 else self.orders.number(offer)
            yield self._tell(world._replace(register=register), number, ("register", register))

    def _local_moves(self, place: Place) -> Iterator[tuple[str, Place]]:
        rank, scene = place.rank, self.scene
        if rank.stand in ENDS:
            return
        if rank_protocol.patience_s(rank) is not None:
            yield "time", self._after(place, rank_protocol.RankEvent.PATIENCE_OVER)
        if rank.stand is Stand.SAVING and rank.order is not None:
            yield "save", self._after(replace(place, has_part=True), Saved(rank.order.halt))
            yield "save", self._after(place, Saved(rank.order.halt, LATE))
        is_keeping = rank.stand in (Stand.SAVING, Stand.SAVED)
        if is_keeping and place.is_blocked and not rank.is_bound:
            # What hung goes on by itself; a main thread that comes to its next step then stands.
            yield "move", replace(place, is_blocked=False)
        if not (rank.is_standing or place.is_past or place.is_blocked):
            if is_keeping:
                yield "step", self._after(place, Reached(STEP))
            elif scene.is_nonfinite or (rank.stand is Stand.WILLING and rank.step == STEP):
                yield "step", self._after(place, Reached(STEP, is_agreed=not scene.is_nonfinite))
            else:
                yield "step", replace(place, is_past=True)
        yield "death", self._after(_without_line(place), rank_protocol.RankEvent.SIDECAR_LOST)
        yield "death", replace(_without_line(place), rank=replace(rank, stand=Stand.DEAD), offer=None)

    def _of_wires(self, world: World, number: int, index: int) -> Iterator[World]:
        place = self.places.items[index]
        if place.down:
            yield self._tell(world, number, ("down", 0))
            if world.losses:
                lost = self.places.number(replace(place, down=place.down[1:]))
                yield _put(world, number, lost)._replace(losses=world.losses - 1)
        if place.up:
            rest = _put(world, number, self.places.number(replace(place, up=place.up[1:])))
            if world.is_up:
                yield self._tell_coordinator(rest, place.up[0])
            if world.losses and isinstance(place.up[0], Heard):
                yield rest._replace(losses=world.losses - 1)

    def _of_coordinator(self, world: World) -> Iterator[World]:
        if not world.is_up:
            halt = protocol.recalled(self.journals.items[world.journal], self._everyone, world.standing)
            if halt is not None:
                halt = replace(halt, gone=frozenset(n for n in self._everyone if not _has_line(self.place(world, n))))
            yield world._replace(is_up=True, halt=-1 if halt is None else self.halts.number(halt))
            return
        halt = self.halt(world)
        if halt is None:
            if not self.journals.items[world.journal] and self.scene.must_stand <= world.standing:
                begun, actions = protocol.begin(self.scene.order, self._everyone, world.standing)
                yield self._do(world._replace(halt=self.halts.number(begun)), actions)
        else:
            yield self._tell_coordinator(world, protocol.HaltEvent.OVER)
            if halt.course is Course.SEALING:
                parts = frozenset(number for number in self._everyone if self.place(world, number).has_part)
                named = world._replace(sealed=parts) if world.sealed is None else world
                yield self._tell_coordinator(named, protocol.HaltEvent.SEALED)
            if world.repeats:
                yield self._tell_coordinator(world._replace(repeats=world.repeats - 1), protocol.HaltEvent.AGAIN)
        if world.deaths:
            yield world._replace(is_up=False, halt=-1, deaths=world.deaths - 1)

    def _tell(self, world: World, number: int, what: tuple[str, int]) -> World:
        """A rank is told what its wire, or the register, says."""
        key = (world.places[number], what)
        after = self._told.get(key)
        if after is None:
            place = self.place(world, number)
            if what[0] == "register":
                found = self._after(replace(place, offer=None), Answered(self.orders.items[what[1]]))
            else:
                reached = STEP if place.is_past or place.rank.is_standing else STEP - 1
                found = self._after(replace(place, down=place.down[1:]), OrderArrived(place.down[0], reached))
            after = self._told[key] = self.places.number(found)
        return _put(world, number, after)

    def _after(self, place: Place, event: rank_protocol.Event) -> Place:
        """A rank's place after an event."""
        rank, actions = rank_protocol.advance(place.rank, event, self.scene.rank_table)
        place = replace(place, rank=rank)
        for action in actions:
            match action:
                case Say(state=state, halt=halt) if rank.has_sidecar:
                    place = replace(place, up=(*place.up, Heard(rank.number, state, halt, STEP)))
                case Ask(order=order):
                    place = replace(place, offer=order)
                case Do.RELEASE:
                    place = replace(place, is_past=True)
                case Do.LEAVE | Do.DIE:
                    place = replace(_without_line(place) if rank.has_sidecar else place, offer=None)
        return place

    def _tell_coordinator(self, world: World, event: protocol.Event) -> World:
        if isinstance(event, Heard):
            change = {event.rank}
            standing = world.standing | change if event.state == "held" else world.standing
            world = world._replace(standing=standing - change if event.state == "released" else standing)
        if world.halt < 0:
            return world
        key = (world.halt, event)
        known = self._told.get(key)
        if known is None:
            halt, actions = protocol.advance(self.halts.items[world.halt], event, self.scene.table)
            known = self._told[key] = (self.halts.number(halt), actions)
        return self._do(world._replace(halt=known[0]), known[1])

    def _do(self, world: World, actions: tuple[protocol.Action, ...]) -> World:
        for action in actions:
            if not isinstance(action, Tell):
                continue
            # Written down before it is sent.
            journal = self.journals.items[world.journal]
            if action.order not in journal:
                world = world._replace(journal=self.journals.number((*journal, action.order)))
            for number in action.ranks:
                place = self.place(world, number)
                if _has_line(place):
                    world = _put(world, number, self.places.number(replace(place, down=(*place.down, action.order))))
        return world


def _has_line(place: Place) -> bool:
    return place.rank.has_sidecar and place.rank.stand is not Stand.DEAD


def _without_line(place: Place) -> Place:
    """What was on its way up still arrives."""
    return replace(place, down=(), up=(*place.up, Gone(place.rank.number)))


def _put(world: World, number: int, place: int) -> World:
    return world._replace(places=(*world.places[:number], place, *world.places[number + 1 :]))
