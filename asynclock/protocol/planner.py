"""When an acquisition asks next, after a round that brought no hold.

The `Planner` collects the facts of this round and of earlier ones. `after_refusal` and `after_notice` decide what to do
next. The functions after them say when, `Pace` has the pauses that grow, and `Obstacles` knows the holders that block a
waiter over N nodes.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from asynclock._errors import ConfigError
from asynclock._options import QUORUM_TIMEOUT, longest_node_timeout
from asynclock.protocol.causes import NoLease
from asynclock.protocol.core import uniform
from asynclock.quorum.ballot import UNREACHABLE
from asynclock.quorum.denials import first_free, is_held, most_named, soonest
from asynclock.rules.model import ID_LENGTH, TIMED, WAIT, parts_of, rests
from asynclock.stores.port import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asynclock._errors import LockError, QuorumUnavailable
    from asynclock.protocol.core import Core
    from asynclock.protocol.terms import Terms
    from asynclock.quorum.ballot import Ballot
    from asynclock.rules.model import Kind, Slots

    Random: TypeAlias = Callable[[], float]
    """A number from 0.0 up to 1.0: jitter keeps clients out of step."""


# -- what to do next ---------------------------------------------------------------------------------------------------


class Next(Enum):
    """The next step of an acquisition."""

    STOP = "stop"  # the name is held, and the time is over
    NOTHING = "nothing"  # the event changes nothing
    TAKE_GRANT = "take the grant"  # a ticket became the hold
    TRY = "try"  # ask for the hold at once
    TRY_WITH_NEW_ID = "try with a new id"
    TRY_ANOTHER_SLOT = "try another slot"
    TRY_AFTER_ROUND_TRIP = "try after a round trip"  # more nodes may notify until then
    TRY_WHEN_FREE = "try when free"  # the node said when that will be
    WAIT_FOR_HOLDER = "wait for the holder"
    WAIT_FOR_HOLDERS = "wait for the holders"  # several hold it, or votes are split (`Obstacles`)
    WAIT_FOR_TURN = "wait for its turn"  # the name is free, but others are before it in the queue
    LET_EARLIER_TRY = "let earlier waiters try"  # they were notified; they try first
    BACK_OFF_AFTER_SPLIT = "back off after split votes"
    POLL = "poll"  # no notice will come: ask again after a growing pause
    POLL_WITH_NEW_ID = "poll with a new id"


class Refusal(NamedTuple):
    """The facts of a round that did not become a hold, though a majority answered."""

    nodes: int
    time_up: bool = False  # the caller's time is over
    one_try: bool = False  # the caller allows one try (timeout=0)
    other_slot: bool = False  # a slot may be free on a majority, of a kind that has slots
    denied: bool = True  # at a single node: it refused; False: the id is used up (undone, or granted too late)
    has_ticket: bool = False  # the round left a ticket
    notices: bool = True  # notices come from a majority
    plain: bool = False  # it was sent as the server's own SET NX, which leaves no ticket
    probe: bool = False  # it renewed the ticket, and did not ask for the hold
    rank: int = 0  # the tickets in the queue before that of this acquisition
    free: bool = False  # a majority says that nobody holds the name
    one_holder: bool = False  # one hold is in the way at a majority
    waiters_first: bool = False  # of a kind that has slots: earlier waiters keep it out at a majority, and no hold does
    several_holders: bool = False  # several may hold the name, and a majority refuses because of a hold
    turns: int = 0  # this kind enters in the order of the queue, so many of the first at a time; 0: in any order


def after_refusal(facts: Refusal) -> Next:
    """The next step after a refusal. Pure."""
    if facts.one_try:
        return Next.TRY_ANOTHER_SLOT if facts.other_slot else Next.STOP
    if facts.time_up:
        return Next.STOP
    return _after_refusal_alone(facts) if facts.nodes == 1 else _after_refusal_by_many(facts)


def _after_refusal_alone(facts: Refusal) -> Next:
    if not facts.denied:
        return Next.POLL_WITH_NEW_ID
    if facts.has_ticket and facts.notices:
        return Next.WAIT_FOR_HOLDER
    # A ticket needs the script. The plain SET may still arrive, so the script must not use the same id: take a new one.
    return Next.TRY_WITH_NEW_ID if facts.plain else Next.POLL


def _after_refusal_by_many(facts: Refusal) -> Next:
    """The order of the checks matters. Another slot may be free, so no wait comes before it. Without notices or a
    ticket nothing would wake a waiter, so each wait comes after these two checks. If several may hold the name,
    `Obstacles` decides about one holder, too. Of a kind that enters in queue order and that several can hold,
    the first ones try again and again, and each one tries after a probe that says it can enter."""
    if facts.other_slot:
        return Next.TRY_ANOTHER_SLOT
    if not facts.notices:
        return Next.POLL
    if not facts.has_ticket:
        return Next.TRY
    if facts.waiters_first and facts.rank < HEADS and not facts.free:
        return Next.BACK_OFF_AFTER_SPLIT
    if facts.several_holders:
        return Next.WAIT_FOR_HOLDERS
    if facts.one_holder:
        return Next.WAIT_FOR_HOLDER
    if 0 < facts.turns <= facts.rank and facts.free and not (facts.probe and facts.turns > 1):
        return Next.WAIT_FOR_TURN
    if facts.probe and facts.free:
        return Next.TRY if facts.rank == 0 else Next.LET_EARLIER_TRY
    return Next.BACK_OFF_AFTER_SPLIT


def after_notice(first: bool, majority: bool, granted: bool, free_now: bool) -> Next:
    """The next step of an acquisition that pauses, after a notice. `first`: it is the first one since the last round
    was sent; `majority`: a majority of the nodes has sent one. Pure."""
    if granted:
        return Next.TAKE_GRANT
    if not free_now:
        return Next.TRY_WHEN_FREE
    if majority:
        return Next.TRY
    return Next.TRY_AFTER_ROUND_TRIP if first else Next.NOTHING


# -- when --------------------------------------------------------------------------------------------------------------


HEADS = 3
"""This many waiters at the head of the queue ask at the moment when the holder's lease ends, because a dead holder
notifies nobody. Each later one asks 2 ms after the one before."""

RENEW = 1 / 3
"""A waiter renews its ticket when this share of the lease has passed ..."""
FRESH = 1 / 2
"""... and a server serves the ticket until this share has passed."""

MIN_TO_YIELD = 0.1
"""A waiter with fewer seconds left than this does not yield to remote waiters: yielding can take half of this time."""

HEAD_POLLS = 0.05
"""Seconds between two polls of the first waiter in the queue, at most, if no notices come."""

COLLISIONS = 8
"""How many more slots an acquire with `timeout=0` tries, at most."""

# Seconds, except the two rates. A pair is the least and the greatest value.
_FOREIGN_PAUSE = (0.05, 0.25)  # between two tries while a client of another library holds the name: it notifies nobody
_NOTIFIED = 0.01  # a notified waiter has at least this time before another one tries
_PAUSE = (0.002, 0.25)  # between two tries where no notices come; doubled after each
_OUTAGE_PAUSE = (0.02, 0.5)  # between two tries while a majority is out of reach; doubled after each
_RECENT = 0.1  # an answer younger than this is recent enough, however short the timeout is
_RECONNECTED = 0.05  # the clients of a server try again within this time after it is connected again
_WAKING_RATE = 5000  # tries per second of all tasks of a client at the end of an outage
_OUTAGE_RATE = 2000  # tries per second of all tasks of a client in an outage, about a fifth of a core
_SPLIT = (0.0005, 0.25)  # between two tries after split votes; doubled after each


class Plan(NamedTuple):
    """When to ask next, unless a notice comes before; and what."""

    at: float
    probe: bool = False  # ask with a probe (`Rounds.send`); else try


def next_question(
    random: Random, now: float, sent: float, lease: float, rank: int, left: float | None, notifies: bool
) -> Plan:
    """When to ask next. The ticket was sent at `sent` and has that rank. The hold that blocks it ends in `left` seconds
    (math.inf: never; None: no hold blocks it). `notifies`: the release of that hold serves the queue."""
    renewal = sent + lease * RENEW * uniform(random, 0.8, 1.0)
    if left is None:
        return Plan(renewal, probe=True)
    if rank < HEADS and not (notifies and left < math.inf):
        return Plan(min(renewal, now + uniform(random, *_FOREIGN_PAUSE)))
    end = now + left + max(0, rank - HEADS + 1) * 0.002
    return Plan(end) if end < renewal else Plan(renewal, probe=True)


def after_notice_to_another(random: Random, now: float, rtt: float) -> Plan:
    """When to try after a server has notified another waiter. Normally that waiter enters, and its release notifies
    this one. This try is needed only if that waiter does not come."""
    return Plan(now + max(2 * round_trip(rtt), _NOTIFIED) * uniform(random, 1.0, 2.0))


def after_split(random: Random, now: float, rtt: float, rank: int, splits: int) -> Plan:
    """When to try again after votes were split `splits` times in a row. The first in the queue has the shortest
    pause."""
    pause = min(round_trip(rtt) * (1 + min(rank, 8)) * 2 ** min(splits - 1, 8), _SPLIT[1])
    return Plan(now + pause * uniform(random, 0.5, 1.0))


def after_doubt(random: Random, now: float, sent: float, lease: float, since: float, life: float, doubts: int) -> Plan:
    """When to probe again after the nodes named different holders. Since the time `since`, this waiter knows the
    ids that a majority of the nodes name (`Obstacles.since`). An attempt among them ends within `life` seconds of that,
    and the probe comes after its end. If the nodes named new holders `doubts` times in a row, other clients enter all
    the time. Then the pauses grow, up to the renewal of the ticket, which was sent at `sent`."""
    renewal = sent + lease * RENEW * uniform(random, 0.8, 1.0)
    at = since + life * uniform(random, 1.0, 1.2)
    if doubts:
        at = max(at, now + life * 2 ** min(doubts - 1, 16))
    return Plan(min(at, renewal), probe=True)


def answer_from(give_up: float, timeout: float | None, within: float, rtt: float = 0.0) -> float:
    """The time from which on an answer of a majority is recent enough to refuse a waiter at the end of its time,
    `give_up`. An older answer says nothing about servers that failed since. A waiter without such an answer renews its
    ticket at this time. `within` is the node timeout; `rtt` is the time that the last round took: the answer takes
    about as long.

    This is the only place of that limit. If a waiter asked at one limit and judged the answer by another, it would
    raise QuorumUnavailable for a name that is held, or refuse because of an answer that is too old."""
    return give_up - min(within, max((timeout or math.inf) / 3, 2 * rtt, _RECENT))


def waking_time(crowd: int) -> float:
    """The seconds within which so many tasks try again after an outage: their tries keep the loop busy for half of that
    time."""
    return max(_RECONNECTED, crowd / _WAKING_RATE)


def round_trip(rtt: float) -> float:
    """Seconds to wait for a message that should come within one round trip."""
    return min(max(rtt, _SPLIT[0]), QUORUM_TIMEOUT)


class Pace:
    """The pauses of a waiter that gets no notices, and those in an outage. Both grow."""

    def __init__(self, random: Random, patience: float, within: float = 0.0) -> None:
        self._random = random
        self._patience = patience
        self._within = max(within, QUORUM_TIMEOUT)  # for the answer to the last try
        self._patience_ends: float | None = None  # when the patience for this outage ends
        self.outage: Exception | None = None  # why no majority decided the last round
        self.reasons: dict[int, Exception] = {}  # the last error of each node in this outage
        self._pause = _PAUSE[0]
        self._outage_pause = _OUTAGE_PAUSE[0]

    @property
    def ends(self) -> float:
        """When the patience for this outage ends; math.inf: there is no outage."""
        return math.inf if self._patience_ends is None else self._patience_ends

    def join(self, outage: Exception, patience_ends: float) -> None:
        """An outage that another task has met."""
        self.outage, self._patience_ends = outage, patience_ends

    def begin_outage(self, error: Exception) -> None:
        """No majority decided the last round."""
        self.outage = error

    def after_refusal(self, now: float, soonest: float = math.inf) -> Plan:
        """When to try again after a refusal: after a pause, or in `soonest` seconds if that is less, since a holder's
        lease may end then."""
        pause = min(self._pause * uniform(self._random, 0.5, 1.0), soonest)
        self._pause = min(2 * self._pause, _PAUSE[1])
        return Plan(now + pause)

    def reached(self) -> None:
        """A majority answered, so the outage is over. The next one gets the full patience again."""
        self._patience_ends = self.outage = None
        self.reasons.clear()
        self._outage_pause = _OUTAGE_PAUSE[0]

    def after_outage(self, now: float, give_up: float, crowd: int = 1, *, began: float | None = None) -> Plan | None:
        """When to try again; None: the time is over. `began`: when the unanswered round was sent, from which the
        patience counts; None: now. The more tasks of this client try (`crowd`), the longer each pauses, so that the
        loop has time for other work; they are woken when a majority is connected again. The last try leaves enough time
        for its reply, since a try without a reply would hide the real reason of the outage. After it the waiter sleeps
        until the end."""
        limit = self.outage_limit(now if began is None else began, give_up)
        if now >= limit:
            return None
        pause = max(self._outage_pause, crowd / _OUTAGE_RATE) * uniform(self._random, 0.5, 1.0)
        self._outage_pause = min(2 * self._outage_pause, _OUTAGE_PAUSE[1])
        last = limit - min(self._within, self._patience / 2)
        return Plan(min(now + pause, last) if now < last else limit)

    def outage_limit(self, began: float, give_up: float) -> float:
        """When an acquire gives up in an outage: when its patience or its timeout ends, whichever comes first."""
        self._patience_ends = self._patience_ends or began + self._patience
        return min(self._patience_ends, give_up)


# -- the holders in the way --------------------------------------------------------------------------------------------


NO_HOLDER = Refused(None, "")
"""A refusal without a holder: no majority of the nodes names the same one."""


_SPLIT_TRIES = 3
"""This many tries follow votes that may be split. After them the waiter waits, to find out whether they are."""

_SLOTS_LIVES = 2
"""A node's reply about its slots is used for this many times the longest time of an attempt (`Obstacles._life`). After
that, other slots may be free."""

_REMEMBERED = 64
"""A waiter remembers at most this many ids, or one for each node if that is more."""


def notifies(holder: str) -> bool:
    """Whether the waiter can rely on the end of this hold: its release serves the queue, or it is no client's hold but
    a name that rests (min_hold, once) until a known time."""
    return holder[ID_LENGTH : ID_LENGTH + 1] == "|" or holder in TIMED


class Obstacles:
    """The ids that the nodes have named to one waiter, of a kind that several may hold.

    Each node names one of the holders, and not all nodes name the same: the first hold at one node need not be the
    first at another. The nodes also name different ids while the votes are split between attempts. The waiter has to
    wait for holds: their releases notify it. It must not wait for attempts: the undo of a minority notifies nobody, and
    the waiter would sleep until it renews its ticket, although the name is free.

    Time separates the two. An attempt is decided, and undone, within two node timeouts, and its id never comes again.
    So an id that was named for longer than that is the id of a hold. Clients that are far from the nodes have longer
    node timeouts, so the longest that any client of the name may have is the limit. Until then the waiter probes, at
    first after two node timeouts of its own, then with pauses that grow.

    Over N nodes a permit of a semaphore is a slot, and a hold may be missing at a minority of the nodes. A node that
    grants a slot does not say which others are taken there. So one refusal does not show that no slot is free on a
    majority; the replies to the last few attempts together show it."""

    __slots__ = ("_doubts", "_life", "_longest", "_random", "_since", "_taken")

    def __init__(self, random: Random, life: float, longest: float = 0.0) -> None:
        self._random = random
        self._life = life  # seconds for which the nodes may name an attempt of this client, at most
        self._longest = max(life, longest)  # and one of any client
        self._since: dict[str, float] = {}  # id -> when it was named first
        self._taken: dict[int, tuple[float, Slots]] = {}  # node -> when it was asked, and which slots are taken there
        self._doubts = 0  # refusals in a row that may have been split votes

    def plan(self, ballot: Ballot, now: float, rtt: float, rank: int) -> Plan:
        """When to ask next, after a refusal by a majority that all name a holder."""
        denials, lease = ballot.denials(), ballot.op.lease
        since = self.since(denials, ballot.nodes, now)
        one = ballot.holder()
        if one is not None or since + self._longest <= ballot.sent:
            self._doubts = 0
            if one is not None:
                return next_question(self._random, now, ballot.sent, lease, rank, one.left, notifies(one.holder))
            all_notify = all(notifies(refused.holder) for refused in denials if refused.left is not None)
            return next_question(
                self._random, now, ballot.sent, lease, rank, first_free(denials, ballot.nodes), all_notify
            )
        if ballot.op.verb is WAIT and not self._doubts:  # it was held before, and no notice has come since
            self._doubts = _SPLIT_TRIES
        self._doubts += 1
        if self._doubts <= _SPLIT_TRIES:
            return after_split(self._random, now, rtt, rank, self._doubts)
        # An id that is known for longer than an attempt of this client takes may be an attempt of another client.
        known = ballot.sent - since
        life = self._life if known < self._life else min(4 * known, self._longest)
        return after_doubt(self._random, now, ballot.sent, lease, since, life, self._doubts - _SPLIT_TRIES - 1)

    def since(self, denials: Collection[Refused], nodes: int, now: float) -> float:
        """The time since which the ids at a majority of the nodes are known. Each node names one id: this is the
        majority-th earliest of the times at which these ids were first named. A rest is no attempt."""
        ids = [refused.holder for refused in denials if refused.left is not None]
        since = {holder: self._since.pop(holder, now) for holder in dict.fromkeys(ids)}
        self._since.update(since)  # in the order in which they were named last
        while len(self._since) > max(_REMEMBERED, nodes):
            del self._since[next(iter(self._since))]
        return sorted(-math.inf if rests(holder) else since[holder] for holder in ids)[nodes // 2]

    def taken(self, ballot: Ballot) -> list[Slots]:
        """The slots in use at each node, of a kind that has slots, by its recent replies."""
        sent = ballot.sent
        self._taken.update((index, (sent, slots)) for index, slots in ballot.taken().items())
        return [slots for when, slots in self._taken.values() if when > sent - _SLOTS_LIVES * self._life]


# -- the planner -------------------------------------------------------------------------------------------------------


class Planner:
    """The planner of one acquisition, made after its first round without a hold, or when it begins to ask in an outage
    that the asker before it has met."""

    def __init__(self, core: Core, terms: Terms, began: float) -> None:
        self.began = began  # when the first round was sent, or when it began to ask in that outage
        self._core = core
        self._terms = terms
        self._pace = Pace(core.random, core.settings.patience, core.quorum.limits.longest)
        self._obstacles: Obstacles | None = None
        self._slot: int | None = None  # the one to ask for next; None: any
        self._splits = 0  # split votes, or tries of another slot, in a row
        self.met_attempt = False  # the last try was refused because another one had its slot
        self.refused: Refused | None = None  # the last refusal by a majority; None after an outage
        self.answered_at = -math.inf  # when a majority answered last; -math.inf after an outage
        # The error of the last round, if nodes lost their idle connections. None again once a majority answers, and in
        # an outage.
        self.interrupted: LockError | None = None
        self._interrupted_until = 0.0
        self._refused_at = began
        self.rtt = 0.0  # seconds that the last round took

    # -- a majority is out of reach ------------------------------------------------------------------------------

    def check_outage(self, now: float, give_up: float) -> None:
        """Raise the error of an outage that has lasted for too long, or of an interruption at the end of the time."""
        if self.interrupted is not None and now >= give_up:
            raise self.interrupted
        if self._pace.outage is not None and now >= self._pace.outage_limit(now, give_up):
            raise self._pace.outage

    @property
    def in_outage(self) -> bool:
        """Whether it waits for the end of an outage."""
        return self._pace.outage is not None

    def join_outage(self, error: LockError, patience_ends: float) -> None:
        """The task that asked before met an outage, and this one has waited behind it."""
        self._pace.join(error, patience_ends)

    @property
    def patience_ends(self) -> float:
        """When the patience for this outage ends; math.inf: there is no outage."""
        return self._pace.ends

    def error(self, ballot: Ballot) -> ConfigError | QuorumUnavailable:
        """The error of a round without a majority. A node that was silent in it is reported with its last error in this
        outage."""
        error = self._core.quorum.unavailable(ballot, self._terms.name, self._pace.reasons)
        self._pace.reasons.update(ballot.errors())
        return error

    def may_be_interrupted(self, now: float) -> bool:
        """Whether to repeat a round that failed because its connections closed, once they are back. This holds for as
        long as an attempt to connect may take. After that a server that hangs up on each op is an outage."""
        if self.in_outage or (self.refused is None and self._terms.timeout != 0):
            return False
        return self.interrupted is None or now < self._interrupted_until

    def answer_from(self, give_up: float) -> float:
        """See the function of this name."""
        within = self._core.within(self._terms.settings)
        return answer_from(give_up, self._terms.timeout, within, self.rtt)

    def must_ask_by(self, give_up: float) -> float:
        """When it must ask, for an answer that is new enough when its time is up; math.inf: it has one, or an outage
        decides."""
        if self.refused is None or self.interrupted is not None:
            return math.inf
        by = self.answer_from(give_up)
        return by if self.answered_at < by else math.inf

    def after_interruption(self, error: LockError, now: float, give_up: float) -> Plan:
        """When to ask again, at the latest: connections that were closed while they were idle are made again."""
        if self.interrupted is None:
            self._interrupted_until = now + self._core.settings.connect_timeout
        self.interrupted = error
        return Plan(min(self._interrupted_until, give_up), probe=self.refused is not None)

    def after_outage(
        self, error: ConfigError | QuorumUnavailable, ballot: Ballot, now: float, give_up: float, crowd: int
    ) -> Plan:
        """When to ask again. `crowd`: so many calls of this client are under way. Raises the error if the time is over,
        or if it is a ConfigError."""
        self.refused = self.interrupted = None
        self.answered_at = -math.inf
        began = ballot.sent
        again = None if self._terms.timeout == 0 else self._pace.after_outage(now, give_up, crowd, began=began)
        try:
            if again is None or isinstance(error, ConfigError):
                raise error
            self._pace.begin_outage(error)
        finally:  # it refers to this frame, too: as in the caller, a cycle would stay
            del error
        return again

    # -- a majority has refused ----------------------------------------------------------------------------------

    def after_refusal(self, ballot: Ballot, now: float, give_up: float) -> Next:
        """The next step after a majority refused: in this round or, if the time is over, perhaps in a recent one."""
        if ballot.outcome is not UNREACHABLE:
            self.answered_at, self.rtt, self.interrupted = now, now - ballot.sent, None
        # If the end of the time cut this round short, the earlier refusal stays.
        if ballot.no > ballot.nodes // 2 or self.refused is None:
            self.refused, self._refused_at = ballot.holder() or self._one_of(ballot) or NO_HOLDER, now
        nodes, kind = ballot.nodes, self._terms.kind
        one_try, time_up = self._terms.timeout == 0, now >= give_up
        tries_on = self._splits < COLLISIONS if one_try else not time_up
        vote = ballot.votes[0]
        denied = isinstance(vote, Refused)  # of interest at a single node
        step = after_refusal(
            Refusal(
                nodes=nodes,
                time_up=time_up,
                one_try=one_try,
                other_slot=nodes > 1 and kind.slots > 0 and tries_on and self._choose_slot(ballot),
                denied=denied,
                has_ticket=ballot.op.queueing.number > 0 if nodes > 1 else isinstance(vote, Refused) and vote.rank >= 0,
                notices=self._core.quorum.listens,
                plain=ballot.op.plain,
                probe=ballot.op.verb is WAIT,
                rank=ballot.rank(),
                free=ballot.free() > nodes // 2,
                one_holder=ballot.holder() is not None,
                waiters_first=_refusals_for_waiters(ballot) > nodes // 2,
                several_holders=kind.shared and is_held(ballot.denials(), nodes),
                turns=(HEADS if kind.shared else 1) if kind.respects_queue else 0,
            )
        )
        self.met_attempt = step is Next.TRY_ANOTHER_SLOT
        # The outage is over, unless this round had no ticket and the next one has one: a server that cannot write (out
        # of memory, for example) refuses a round without a ticket, too, and only a ticket reveals that.
        if ballot.op.queueing.number or step not in (Next.TRY, Next.TRY_WITH_NEW_ID):
            self._pace.reached()
        return step

    def _one_of(self, ballot: Ballot) -> Refused | None:
        """One of the holders, of a kind that several may hold: the nodes may name different ones."""
        return most_named(ballot.denials()) if self._terms.kind.shared else None

    def no_lease(self, now: float, waited: float, ballot: Ballot | None) -> NoLease:
        """An acquire that ends without a lease after `waited` seconds: the hold in the way, as a majority named it
        last. `ballot`: its last round; None: another task asked for it."""
        free = ballot is not None and ballot.free() > ballot.nodes // 2
        if self.refused is None or self.refused.left is None:
            return NoLease(waited=waited, free=free)
        age = now - self._refused_at
        return NoLease(self.refused.holder, max(0.0, self.refused.left - age), age, waited, free)

    def plan(self, step: Next, ballot: Ballot, now: float) -> Plan:
        """When to do that step."""
        sent, lease, rank = ballot.sent, self._terms.settings.lease, ballot.rank()
        if step in (Next.WAIT_FOR_HOLDER, Next.WAIT_FOR_HOLDERS):
            self._splits = 0
        elif step in (Next.TRY_ANOTHER_SLOT, Next.BACK_OFF_AFTER_SPLIT):
            self._splits += 1
        match step:
            case Next.WAIT_FOR_HOLDER:
                holder = ballot.holder() or NO_HOLDER
                return next_question(self._core.random, now, sent, lease, rank, holder.left, notifies(holder.holder))
            case Next.WAIT_FOR_HOLDERS:
                return self._known_obstacles.plan(ballot, now, self.rtt, rank)
            case Next.WAIT_FOR_TURN:
                return next_question(self._core.random, now, sent, lease, rank, None, True)
            case Next.LET_EARLIER_TRY:
                return after_notice_to_another(self._core.random, now, self.rtt)
            case Next.BACK_OFF_AFTER_SPLIT:
                return after_split(self._core.random, now, self.rtt, rank, self._splits)
            case Next.TRY_ANOTHER_SLOT if self._splits > 1:
                return after_split(self._core.random, now, self.rtt, 0, self._splits)
            case Next.POLL:
                # Without notices a single node may make the first ticket the hold at any time: find that soon.
                head = HEAD_POLLS if rank == 0 else math.inf
                return self._pace.after_refusal(now, min(soonest(ballot.denials()), head))
            case Next.POLL_WITH_NEW_ID:
                return self._pace.after_refusal(now)
        return Plan(now)

    @property
    def _known_obstacles(self) -> Obstacles:
        if self._obstacles is None:
            core, settings = self._core, self._terms.settings
            longest = longest_node_timeout(core.settings, settings)
            self._obstacles = Obstacles(core.random, 2 * core.within(settings), 2 * longest)
        return self._obstacles

    def _choose_slot(self, ballot: Ballot) -> bool:
        """Choose a slot that a majority may grant; False: none is known, or no other one helps."""
        spare = ballot.nodes - ballot.nodes // 2 - 1
        taken = self._known_obstacles.taken(ballot)
        self._slot = self._terms.kind.choose(taken, spare, self._core.random)
        return self._slot is not None and ballot.op.verb is not WAIT and _refusals_beside_slot(ballot) <= spare

    def take_slot(self) -> int | None:
        """The slot that was chosen for the next attempt; None: any slot."""
        slot, self._slot = self._slot, None
        return slot


def _refusals_beside_slot(ballot: Ballot) -> int:
    """The number of nodes that refuse although the slot of the attempt is free there: waiters go first, or so many hold
    the name as it wants."""
    return sum(kind.slot is not None and kind.slot not in taken for kind, taken in _slots_of(ballot))


def _refusals_for_waiters(ballot: Ballot) -> int:
    """The number of nodes that refuse although the slot is free there, and so is a permit: waiters go first. A probe
    asks for no slot."""
    probe = ballot.op.verb is WAIT
    found = _slots_of(ballot)
    return sum(len(taken) < kind.slots and (probe or kind.slot not in taken) for kind, taken in found)


def _slots_of(ballot: Ballot) -> list[tuple[Kind, tuple[int, ...]]]:
    """Of each refusal the kind that was refused, and its slots in use there."""
    parts = parts_of(ballot.op)
    return [(parts[slots.part].kind, slots.taken) for slots in ballot.taken().values()]
