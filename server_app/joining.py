"""The handshake before a site's first round, and for those that come later.

Every node that has not been asked is asked once; a node that failed is asked again after a while. The start waits,
within its bound, for the minimum number of sites, and then only for nodes that have been asked and are silent.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from server_app.mailbox import Delivery, Mailbox
from server_app.sites import Registry
from server_app.validate import read_metrics
from server_app.versions import differences, own_versions
from umbel.digest import short
from umbel.errors import EXIT_UNAVAILABLE, UmbelError
from umbel.messages import (
    CONTROL_RECORD,
    JOIN,
    STATUS_OK,
    Instruction,
    MessageError,
    Reply,
    control_of,
    from_record,
    to_record,
)

log = logging.getLogger("umbel.server")

# How long a node that refused or failed is left alone before it is asked again.
RETRY_SECONDS = 60.0
# Nodes of one federation come up one after another: this long without a new one counts as all being there.
SETTLE_SECONDS = 3.0


class TooFewSites(UmbelError):
    """The minimum of sites did not join in time."""

    exit_code = EXIT_UNAVAILABLE


class Joining:
    """Asks nodes who they are and admits those that fit."""

    def __init__(
        self,
        grid: Grid,
        mailbox: Mailbox,
        registry: Registry,
        *,
        run: str,
        config_json: str,
        held: bool = False,
        on_event: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        poll_seconds: float = 0.25,
        ttl_seconds: float = 3600.0,
        patient: bool = True,
    ) -> None:
        self._grid, self._mailbox, self.registry = grid, mailbox, registry
        self._run, self._config, self._event = run, config_json, on_event
        self._now, self._sleep, self._poll, self._ttl = now, sleep, poll_seconds, ttl_seconds
        # With a lossy way down a site says what it holds, so that it is not sent that.
        self._directives = json.dumps({"held": True}) if held else "{}"
        self._versions = own_versions()
        self._asked: dict[int, float] = {}
        self._refused: dict[int, tuple[float, str]] = {}
        self._waiting_facts: list[tuple[str, int, dict[str, Any]]] = []
        self._started = False
        # Simulated nodes are all there from the start: nobody mends or starts one while we wait.
        self._patient = patient

    def online(self) -> set[int]:
        """Return the node ids that are connected now; a failing call counts as nobody new."""
        try:
            return set(self._grid.get_node_ids())
        except Exception as error:
            log.warning("the list of nodes could not be read: %s", error)
            return set()

    def ask_new(self, online: set[int], remaining_seconds: float) -> None:
        """Send the join question to nodes not asked yet, or refused a while ago."""
        known = {site.node for site in self.registry.sites.values()} | {
            node for _, node, _ in self._waiting_facts
        }
        items = []
        for node in sorted(online - known):
            refused = self._refused.get(node)
            if node in self._asked or (refused and self._now() - refused[0] < RETRY_SECONDS):
                continue
            question = Instruction(
                run=self._run,
                round=0,
                attempt=0,
                base="",
                site="",
                remaining_seconds=remaining_seconds,
                config=self._config,
                directives=self._directives,
            )
            message = Message(
                RecordDict({CONTROL_RECORD: to_record(question)}), node, JOIN, ttl=self._ttl, group_id="join"
            )
            self._asked[node] = self._now()
            items.append((f"node {node}", node, JOIN, message))
        for failed in self._mailbox.send(items):
            self._settle(failed)

    def collect(self) -> None:
        """Take in the answers that have arrived."""
        for delivery in self._mailbox.poll(lambda parcel: parcel.tag == JOIN):
            self._settle(delivery)
        if self._started:
            self._admit_all()

    def _settle(self, delivery: Delivery) -> None:
        node = delivery.parcel.node
        self._asked.pop(node, None)
        if delivery.message is None:
            self._refuse(node, delivery.parcel.site, delivery.failure)
            return
        try:
            reply = from_record(Reply, control_of(delivery.message.content))
        except MessageError as error:
            self._refuse(node, delivery.parcel.site, str(error))
            return
        if reply.status != STATUS_OK:
            self._refuse(node, reply.site, f"{reply.status}: {reply.reason}")
            return
        self._waiting_facts.append((reply.site[:100], node, read_metrics(reply)))

    def _admit_all(self) -> None:
        online = self.online()
        for name, node, facts in sorted(self._waiting_facts, key=lambda item: item[0]):
            reason = self.registry.admit(name, node, facts, online=online)
            if reason:
                self._refuse(node, name, reason)
                continue
            self._event(
                "site_joined",
                site=name,
                node=str(node),
                rows_train=facts.get("rows_train"),
                rows_heldout=facts.get("rows_heldout"),
                versions=facts.get("versions"),
                adapted_modules=facts.get("adapted_modules"),
                trainable_parameters=facts.get("trainable_parameters"),
                counters=facts.get("counters"),
                model=short(str(facts.get("model", ""))),
                device=facts.get("device"),
                key=facts.get("key"),
            )
            log.info(
                "site %s joined: %s training rows, %s held out, %s adapted modules",
                name,
                facts.get("rows_train"),
                facts.get("rows_heldout"),
                facts.get("adapted_modules"),
            )
            for difference in differences(facts.get("versions"), self._versions):
                self._event("version_differs", site=name, difference=difference)
                log.warning("site %s: %s", name, difference)
        self._waiting_facts.clear()

    def _refuse(self, node: int, site: str, reason: str) -> None:
        self._refused[node] = (self._now(), f"{site}: {reason}")
        self._event("site_refused", site=site, node=str(node), reason=reason)
        log.warning("site %s is refused: %s", site, reason)

    def reasons(self) -> str:
        """Return the reasons of all refused nodes, for an error message."""
        return "; ".join(reason for _, reason in self._refused.values())

    def wait_for_start(self, minimum: int, timeout_seconds: float) -> None:
        """Wait until `minimum` sites have joined and the rest has answered; raises TooFewSites at the timeout."""
        begin = last_new = self._now()
        seen: set[int] = set()
        while True:
            online = self.online()
            if online - seen:
                last_new = self._now()
            seen |= online
            elapsed = self._now() - begin
            self.ask_new(online, max(1.0, timeout_seconds - elapsed))
            self.collect()
            ready, waiting = len(self._waiting_facts), len(self._asked)
            settled = not waiting and self._now() - last_new >= SETTLE_SECONDS
            hopeless = settled and bool(seen) and not self._patient
            if (ready >= minimum and settled) or hopeless or elapsed >= timeout_seconds:
                break
            self._sleep(self._poll)
        self.registry.set_reference([facts for _, _, facts in self._waiting_facts])
        self._started = True
        self._admit_all()
        joined = len(self.registry.sites)
        if joined < minimum:
            why = self.reasons()
            raise TooFewSites(
                f"{joined} of the {minimum} sites that clients.minimum asks for joined within {elapsed:.0f} s "
                f"({len(seen)} nodes were seen).{' Refused: ' + why + '.' if why else ''} "
                "Start the missing sites, mend those refused, or lower clients.minimum."
            )
