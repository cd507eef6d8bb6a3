"""SplitFed: the two halves of a cut adapter, averaged as one.

    V1 (default)   phi <- sum p_i phi_i    psi <- sum p_i psi_i     p_i = tokens of the chunks both halves completed
    V2 (shared)    phi <- sum p_i phi_i    psi: one body, stepped in order of arrival

(Thapa et al. 2022, arXiv 2004.12088; with LoRA: Lin et al. 2024, arXiv 2407.00952.) A site is sent and returns only the
tensors of its own blocks; the engine joins them with the half the server holds for that site, so that what is averaged
is a whole adapter under whole-model names, by the same mean as every other method. With V2 and with sources whose body
is trained after the sites, `after` returns the body of the next state. How halves are trained is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from compression import Layout
from compression.roles import role_for
from strategies.base import Order, Outcome, Seat, SiteUpdate
from strategies.fedavg import FedAvg
from umbel.exchange import Exchange

# Given the present state and the sites whose updates were merged, returns the body's next tensors and what to record.
After = Callable[[Mapping[str, np.ndarray], list[str]], tuple[Mapping[str, np.ndarray], dict[str, Any]]]


class SplitFed(FedAvg):
    """The weighted mean over joined halves. `site_names` are the tensors that travel to a site and back."""

    name = "splitfed"

    def set_site_names(self, names: Iterable[str]) -> None:
        """Say which tensors of the state live at the sites; the rest is the body's."""
        known = {entry.name for entry in self.layout.entries}
        self.site_names = [n for n in names if n in known]
        self.after: After | None = None

    def whole(self, state: Mapping[str, np.ndarray]) -> Order:
        """Return the order that a joined update answers."""
        return Order(Exchange(), state, state, self.layout, self.layout, self.scales)

    def orders(
        self, state: Mapping[str, np.ndarray], seats: Sequence[Seat], commits: int, *, training: bool = True
    ) -> dict[str, Order]:
        """Return one order for all sites: their half of the state, down and up."""
        half = {name: state[name] for name in self.site_names}
        layout = Layout.from_arrays(half, role_for)
        modules = {name.rsplit(".lora_", 1)[0] for name in half}
        scales = {name: scale for name, scale in self.scales.items() if name in modules}
        order = Order(Exchange(), half, half, layout, layout, scales)
        self.given = {seat.name: order for seat in seats}
        return dict(self.given)

    def aggregate(
        self,
        state: Mapping[str, np.ndarray],
        updates: Iterable[SiteUpdate],
        *,
        expected_weight: float | None = None,
    ) -> Outcome:
        """Return the mean of the joined updates, with the body of `after` where there is one."""
        merged: list[str] = []

        def noted() -> Iterator[SiteUpdate]:
            for update in updates:
                merged.append(update.site)
                yield update

        outcome = super().aggregate(state, noted(), expected_weight=expected_weight)
        if self.after is not None:
            body, facts = self.after(state, merged)
            outcome.state.update({name: np.asarray(a) for name, a in body.items()})
            outcome.metrics.update(facts)
        return outcome
