"""Every error that Diptych raises on purpose, and how each one reaches an HTTP client.

    DiptychError
    +-- ConfigError            the command line, a config file or a model folder is wrong; nothing was started
    +-- RequestError           one request is wrong (4xx); the engine goes on
    |   +-- PromptTooLong
    |   +-- UnknownModel
    |   +-- AdapterError
    |   +-- Unsupported
    +-- Overloaded             the queue is full; the client should come back (503)
    +-- Unavailable            the engine is starting, draining or gone (503)
    +-- DeadlineExceeded       the request's own deadline passed (504)
    +-- TransferError          KV did not move between two engines: retried elsewhere, or the request fails
    |   +-- PeerIncompatible   the peer's model, layout or protocol does not fit ours
    |   +-- PeerLost           the peer is dead, restarted or out of reach
    |   +-- TransferRejected   one side refused this transfer, and nothing moved
    |   +-- TransferExpired    it was not over by its deadline
    +-- WorkerError            a step failed on the device: the engine stops
    |   +-- RankLost           a rank of this engine is dead, stopped, or out of step
    +-- InvariantError         a bug: our own books do not balance

Request-scoped errors never stop the engine, engine-scoped ones always do, and every request is answered.
"""

from __future__ import annotations

from collections.abc import Iterator


class DiptychError(Exception):
    """Root of the tree.

    `status` is the HTTP status that reports this error, `code` a stable word for programs.
    """

    status = 500
    code = "internal_error"


class ConfigError(DiptychError):
    """What the user configured cannot be served; says which value and what to do instead."""

    code = "invalid_configuration"


class RequestError(DiptychError):
    """One request cannot be served as it was sent.

    Args: message: what is wrong, which value, what to do. param: the offending field, if one can be named.
    """

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Prompt and requested output do not fit the model's context or the KV pool."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The request names a model or adapter that is not served here."""

    status = 404
    code = "model_not_found"


class AdapterError(RequestError):
    """An adapter cannot be loaded or unloaded; nothing has changed."""

    code = "adapter_refused"


class Unsupported(RequestError):
    """The request asks for something this engine does not do."""

    code = "unsupported"


class Overloaded(DiptychError):
    """The waiting queue is full. `retry_after_s` is a hint for the client."""

    status = 503
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(DiptychError):
    """The engine is not ready: starting, draining or stopped."""

    status = 503
    code = "unavailable"


class DeadlineExceeded(DiptychError):
    """The request's deadline passed before it finished."""

    status = 504
    code = "deadline_exceeded"


class TransferError(DiptychError):
    """KV did not move between two engines. The request may be tried elsewhere."""

    status = 502
    code = "transfer_failed"


class PeerIncompatible(TransferError):
    """The peer serves something else or speaks otherwise; says both values."""

    code = "peer_incompatible"


class PeerLost(TransferError):
    """The peer is dead, was restarted, or cannot be reached."""

    code = "peer_lost"


class TransferRejected(TransferError):
    """The peer, or this side, refused the transfer before any byte moved."""

    code = "transfer_rejected"


class TransferExpired(TransferError):
    """The transfer was not over by its deadline."""

    code = "transfer_expired"


class WorkerError(DiptychError):
    """A step failed on the device; the engine cannot go on."""

    code = "worker_failed"


class RankLost(WorkerError):
    """A rank of this engine is dead, stopped, or out of step with the others; the group cannot be used any more.

    Args: rank: its number within the group, or None where only the loss is known.
    """

    code = "rank_lost"

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class InvariantError(DiptychError):
    """A state that must not happen: a bug in Diptych, please report it."""

    code = "invariant_violated"


def error_of_kind(kind: str, message: str, param: str | None = None) -> DiptychError:
    """The exception that a message names by class; an unknown kind is a plain DiptychError.

    Args: param: the offending field, kept where the class has one.
    """
    found = next((each for each in _kinds(DiptychError) if each.__name__ == kind), DiptychError)
    return found(message, param) if issubclass(found, RequestError) else found(message)


def _kinds(root: type[DiptychError]) -> Iterator[type[DiptychError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)
