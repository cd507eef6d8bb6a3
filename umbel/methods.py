"""What each method exchanges in a round: the one table that the server obeys and the plan counts.

`exchange_of` is a pure function of the configuration, the number of committed rounds and a site's place. The maths
of the methods is the server's business.
"""

from __future__ import annotations

from umbel.config.schema import Config
from umbel.errors import ConfigError
from umbel.exchange import Exchange, Form

# Committed rounds of the engine that make one round of the method.
STAGES = {"fedask": 2}
# Methods without a global model: a site is scored and exported with its own factors.
PERSONAL = ("fedsa",)


def site_ranks(config: Config) -> dict[str, int]:
    """Return the ranks named in `lora.site-ranks`; raises ConfigError for what is not `site=rank`."""
    found = {}
    for part in filter(None, (p.strip() for p in config.lora.site_ranks.split(","))):
        name, _, value = part.rpartition("=")
        if not name.strip() or not value.strip().isdigit() or int(value) < 1:
            raise ConfigError(
                "lora.site-ranks",
                "is not a list of site=rank",
                got=part,
                allowed="comma separated site=rank with ranks >= 1",
                remedy="Example: clinic=4,kitchen=8.",
            )
        found[name.strip()] = int(value)
    return found


def rank_of_site(config: Config, site: str, asked: int = 0) -> int:
    """Return a site's rank: `lora.site-ranks`, else what its node config asks, else `lora.rank`; never above that."""
    wanted = site_ranks(config).get(site) or asked or config.lora.rank
    return min(wanted, config.lora.rank)


def exchange_of(
    config: Config,
    commits: int,
    *,
    rank: int = 0,
    carry: int = 0,
    position: int = 0,
    sketch: int = 0,
    frozen_crc: str = "",
    returning: bool = False,
) -> Exchange:
    """Return a site's exchange after `commits` committed rounds.

    `rank` is the site's (0: the run's), `carry` the rank of the side adapter it gets, `position` its place in the
    sorted cohort, `sketch` the columns of a sketch. `returning` is for a site that took part in the last committed
    round: what was frozen there it still has.
    """
    method, heads = config.run.method, config.lora.heads
    both = Form(rank=rank)
    side = Form(rank=rank, carry=carry)
    if method == "ffa":
        return Exchange(Form("B"), Form("B"), trains="B", seeded="A", frozen_crc=frozen_crc)
    if method == "rolora":
        phase, other = ("B", "A") if commits % 2 == 0 else ("A", "B")
        if returning and commits:
            return Exchange(
                Form(other), Form(phase), trains=phase, stored=phase, hold=other, frozen_crc=frozen_crc
            )
        return Exchange(Form(), Form(phase), trains=phase, hold=other)
    if method == "fedsa":
        return Exchange(Form("A"), Form("A"), own="B")
    if method in ("carry", "fedex", "flora", "fedplora"):
        return Exchange(side, both)
    if method in ("flexlora", "raflora", "hetlora"):
        return Exchange(both, both)
    if method == "ravan":
        core = Form("", cores=heads)
        return Exchange(core, core, trains="core", seeded="AB", frozen_crc=frozen_crc)
    if method == "fedsb":
        if commits == 0:
            return Exchange(Form(), Form(), trains="gradient")
        core = Form("", cores=1)
        if returning and commits > 1:
            return Exchange(core, core, trains="core", stored="AB", hold="AB", frozen_crc=frozen_crc)
        return Exchange(Form("AB", cores=1), core, trains="core", hold="AB")
    if method == "ecolora":
        part = ((position + commits + 1) % config.lora.segments, config.lora.segments)
        return Exchange(Form(), Form(part=part))
    if method == "fedask":
        probe = commits // STAGES[method] + 1
        out, back = (Form("", sketch=sketch, sketch_side=side) for side in ("out", "in"))
        if commits % 2 == 0:
            return Exchange(Form(), out, probe=probe, keep=True)
        return Exchange(out, back, trains="", again=True)
    return Exchange()
