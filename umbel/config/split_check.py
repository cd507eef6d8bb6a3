"""Settings of split learning that contradict each other; refused before any site is asked."""

from __future__ import annotations

from umbel.config.schema import Config
from umbel.errors import ConfigError
from umbel.split_link import host_of, is_loopback

MAX_PORT = 65_535


def check_split(config: Config) -> None:
    """Raise ConfigError naming key, value, what is allowed and what to do; nothing unless run.task = 'split'."""
    if config.run.task != "split":
        return
    _check_method(config)
    _check_shape(config)
    _check_link(config)


def _refuse(key: str, problem: str, got: object, allowed: str, remedy: str = "") -> None:
    raise ConfigError(
        f"split.{key}" if "." not in key else key, problem, got=got, allowed=allowed, remedy=remedy
    )


def _check_method(config: Config) -> None:
    s = config.split
    if config.run.method not in ("fedavg", "fedit"):
        _refuse(
            "run.method",
            "does not average whole-model adapters, which both halves of a split run need",
            config.run.method,
            "'fedavg' or 'fedit' with run.task = 'split'",
        )
    if config.train.mode != "lora":
        _refuse("train.mode", "must be 'lora' with run.task = 'split'", config.train.mode, "'lora'")
    if config.lora.site_ranks:
        _refuse(
            "lora.site-ranks",
            "has no meaning with run.task = 'split': one body serves every site",
            config.lora.site_ranks,
            "empty",
        )
    if config.lora.dropout > 0:
        _refuse(
            "lora.dropout",
            "cannot be used with run.task = 'split': the body's forward is repeated for its backward",
            config.lora.dropout,
            "0",
        )
    if config.train.accumulation != 1:
        _refuse(
            "train.accumulation",
            "must be 1 with run.task = 'split': split.chunk batches are one step",
            config.train.accumulation,
            "1",
            "Set split.chunk instead.",
        )
    if config.clients.late != "drop":
        _refuse(
            "clients.late",
            "must be 'drop' with run.task = 'split': the body half of a late site is gone with its round",
            config.clients.late,
            "'drop'",
        )
    if config.privacy.clip_norm > 0:
        _refuse(
            "privacy.clip-norm",
            "does not cover what split learning sends: activations leave the site every batch",
            config.privacy.clip_norm,
            "0",
            "Use run.task = 'sft' for differential privacy.",
        )
    if s.client_optimizer == "zeroth":
        _refuse("client-optimizer", "= 'zeroth' is not built", "zeroth", "'first'")
    if s.tied != "refuse":
        _refuse(
            "tied",
            "has no effect: with adapters no embedding is trained, so its copies on both sides stay equal",
            s.tied,
            "'refuse'",
        )


def _check_shape(config: Config) -> None:
    s = config.split
    if s.shape == "u" and s.gradient != "true":
        _refuse(
            "shape",
            f"= 'u' cannot be combined with split.gradient = {s.gradient!r}: the server would need the labels",
            s.shape,
            "'two-part'",
            "Set split.shape = 'two-part', or split.gradient = 'true' to keep labels at the site.",
        )
    if s.shape == "two-part" and s.labels == "private":
        _refuse(
            "shape",
            "= 'two-part' shows the labels to the server, and split.labels = 'private'",
            s.shape,
            "'u'",
            "For a causal language model the labels are the text itself.",
        )
    if s.gradient == "aux-estimate" and config.model.attention == "sdpa":
        _refuse(
            "model.attention",
            "= 'sdpa' has no second derivative, which the alignment of aux-estimate needs",
            config.model.attention,
            "'eager'",
        )
    if s.on_death == "last-saved" and s.save_every == 0:
        _refuse("save-every", "must be > 0 with split.on-death = 'last-saved'", 0, ">= 1")


def _check_link(config: Config) -> None:
    s = config.split
    if s.transport == "stream" and s.gradient != "true":
        _refuse(
            "transport",
            f"= 'stream' is not needed by split.gradient = {s.gradient!r}: it is one message a round",
            s.transport,
            "'messages' or 'auto'",
        )
    if bool(s.tls_cert) != bool(s.tls_key):
        key = "tls-key" if s.tls_cert else "tls-cert"
        _refuse(key, "is missing: certificate and key go together", "", "both files or neither")
    for key, value in (("bind", s.bind), ("address", s.address)):
        if value and not _is_address(value):
            _refuse(key, "is not host:port", value, "host:port, with the port in 0..65535")
    if s.bind and not s.tls_cert and s.transport != "messages" and not is_loopback(host_of(s.bind)):
        _refuse(
            "bind",
            "would send activations in the clear: there is no split.tls-cert",
            s.bind,
            "127.0.0.1:PORT, or any address with split.tls-cert and split.tls-key",
        )
    if (
        s.bind
        and s.tls_cert
        and not s.address
        and not is_loopback(host_of(s.bind))
        and s.transport != "messages"
    ):
        _refuse(
            "address",
            "is empty, so no site would know where to dial",
            "",
            "host:port as sites see it",
            "It must be a name in the certificate.",
        )


def _is_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdigit() and int(port) <= MAX_PORT
