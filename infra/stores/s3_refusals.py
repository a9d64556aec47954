"""Explains what an S3 server means when it refuses, and what to do about it.

put with If-None-Match            answer                                    s3fs makes of it
  it is there already   AWS, versitygw, moto   412 PreconditionFailed, with a Condition   FileExistsError
                        Ceph's gateway         412 PreconditionFailed, without one        a plain OSError
  another write of it   AWS                    409 ConditionalRequestConflict             a plain OSError
  no such puts          older servers          501 NotImplemented                         a plain OSError

After 409 the other write may still fail, so the put has to be tried again.
"""

from __future__ import annotations

from enum import Enum

_KEYS = "look at AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_EXPIRED = "the credentials have expired: renew AWS_SESSION_TOKEN and the keys that belong to it"
_FULL = "the store is full: make room, or raise its quota"
_ONCE = (
    "this server can't create an object only if it is not there (If-None-Match), and two trainers could "
    "publish one version: use one that can, such as AWS S3, Ceph, MinIO or versitygw of today, or file://"
)
_ADVICE = {
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the token is not valid: look at AWS_SESSION_TOKEN; keys that do not expire need none",
    "InvalidAccessKeyId": "the server knows no such key: look at AWS_ACCESS_KEY_ID",
    "XAdminUserNotFound": "the server knows no such key: look at AWS_ACCESS_KEY_ID",  # versitygw
    "SignatureDoesNotMatch": "the secret is not that of the key: look at AWS_SECRET_ACCESS_KEY",
    "AccessDenied": f"it is not allowed: {_KEYS}, and what they may do",
    "403": f"it is not allowed: {_KEYS}, and what they may do",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "NoCredentialsError": f"there are no credentials: {_KEYS}, or at AWS_PROFILE",
    "PartialCredentialsError": f"the credentials are not complete: {_KEYS}",
    "NoSuchBucket": "there is no such bucket: make it, or correct the URL",
    "InsufficientStorage": _FULL,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "NotImplemented": _ONCE,
    "501": _ONCE,
}
# Until somebody changes the environment or the store, each start would meet these again.
LASTING_CODES = frozenset(_ADVICE) - {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"}
_UNREACHABLE = "the server can't be reached: look at AWS_ENDPOINT_URL and the network"
_CONNECTIONS = {"ConnectionError", "HTTPClientError", "TimeoutError"}  # of botocore, aiohttp and Python


class Refusal(Enum):
    """Why an object was not created."""

    EXISTS = "it is there already"
    BUSY = "another write of it is under way"
    CUT = "the connection was cut, as some servers do that refuse what is being sent"
    OTHER = "anything else"


def s3_refusal(error: BaseException) -> Refusal:
    """Return why an object was not created, from the error that the attempt raised."""
    code = code_of(error)
    if isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412"):
        return Refusal.EXISTS
    if code in ("ConditionalRequestConflict", "OperationAborted", "409"):
        return Refusal.BUSY
    return Refusal.CUT if _is_of_connection(error) else Refusal.OTHER


def code_of(error: BaseException) -> str:
    """Return the server's code for an error; the name of Python's exception if no server has answered."""
    inner: BaseException | None = error
    while inner is not None:
        response = getattr(inner, "response", None)  # of a lost connection it is None
        if isinstance(response, dict) and (code := response.get("Error", {}).get("Code")):
            return str(code)
        inner = inner.__cause__
    return type(error).__name__


def explained(error: BaseException) -> str:
    """Return the error in words, with what to do first."""
    code = code_of(error)
    advice = _ADVICE.get(code)
    if advice is None and _is_of_connection(error):
        advice = _UNREACHABLE
    return f"{advice} ({code}: {error})" if advice else f"{code}: {error}"


def _is_of_connection(error: BaseException) -> bool:
    return any(kind.__name__ in _CONNECTIONS for kind in type(error).__mro__)
