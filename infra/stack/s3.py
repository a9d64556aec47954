"""An S3 server on a local folder (versitygw), with keys of its own and one bucket."""

import json
import os
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar

from infra.files.private import make_private
from infra.files.writing import write_whole
from infra.stack.paths import StackPaths
from infra.stack.ports import accepts, address
from infra.stack.s3_binary import binary, ensure_binary
from infra.stack.services import Launch, Service, ServiceContext, ServicesFile, base_env, running_record
from infra.stack.stack_errors import WrongCredentials

BUCKET = "streamrl"
REGION = "us-east-1"
ACCESS_KEY = "STREAMRL_S3_ACCESS_KEY"
SECRET_KEY = "STREAMRL_S3_SECRET_KEY"  # noqa: S105 - the name of a variable
ENDPOINT = "STREAMRL_S3_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Credentials:
    access_key: str
    # Not in the repr, so that it gets into no traceback or log.
    secret_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class S3Access:
    endpoint_url: str
    bucket: str
    credentials: Credentials

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def env(self) -> dict[str, str]:
        """Return the variables for our processes and, under AWS's names, for s3fs and other S3 clients."""
        keys = self.credentials
        return {
            ENDPOINT: self.endpoint_url,
            ACCESS_KEY: keys.access_key,
            SECRET_KEY: keys.secret_key,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            # Without it a client that finds no keys asks the cloud's metadata address, and waits.
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class S3Service(Service):
    name: ClassVar[str] = "s3"
    usual_port: ClassVar[int] = 7070
    start_deadline_s: ClassVar[float] = 120.0

    def prepare(self, context: ServiceContext) -> None:
        if not binary(context.paths).exists():
            context.progress(self.name, "building versitygw (about a minute, once)")
        ensure_binary(context.paths, cancel=context.cancel)

    def launch(self, context: ServiceContext, port: int) -> Launch:
        paths = context.paths
        objects, meta = paths.s3 / "objects", paths.s3 / "meta"
        make_private(objects)
        make_private(meta)
        keys = ensure_credentials(paths)
        env = base_env("AWS_", "VGW_", "ROOT_", "STREAMRL_S3_")
        # By environment, not by argument: arguments are shown to everybody by ps.
        env |= {"ROOT_ACCESS_KEY": keys.access_key, "ROOT_SECRET_KEY": keys.secret_key, "VGW_REGION": REGION}
        # Connections are kept: else each object costs one more round trip, and begins slowly.
        listen = ["--port", f"{address()}:{port}", "--quiet", "--keep-alive"]
        return Launch(
            # The sidecar replaces extended attributes, which not every file system has.
            command=[str(binary(paths)), *listen, "posix", "--sidecar", str(meta), str(objects)],
            env=env,
            url=f"http://{address()}:{port}",
        )

    def is_ready(self, record: ServicesFile, paths: StackPaths) -> bool:
        return accepts(record.port) and _ensure_bucket(record.url, ensure_credentials(paths))


def access(paths: StackPaths) -> S3Access | None:
    """Return how to reach the server; None if it does not run."""
    record = running_record(paths, S3Service.name)
    if record is None:
        return None
    return S3Access(endpoint_url=record.url, bucket=BUCKET, credentials=ensure_credentials(paths))


def ensure_credentials(paths: StackPaths) -> Credentials:
    """Return the credentials in the environment, else those made before, else new ones.

    New ones are kept in a file that only this user can read.
    """
    given = os.environ.get(ACCESS_KEY), os.environ.get(SECRET_KEY)
    if given[0] and given[1]:
        return Credentials(given[0], given[1])
    file = paths.run / "s3-credentials.json"
    try:
        return Credentials(**json.loads(file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        made = Credentials(
            access_key=f"streamrl-{secrets.token_hex(4)}", secret_key=secrets.token_urlsafe(32)
        )
        text = json.dumps({"access_key": made.access_key, "secret_key": made.secret_key})
        write_whole(file, text, mode=0o600)
        return made


def _ensure_bucket(endpoint: str, keys: Credentials) -> bool:
    """Create the bucket unless it exists. Return False if the server does not answer yet."""
    from botocore.exceptions import ClientError, HTTPClientError

    client = _client(endpoint, keys)
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            return True
        # By status: an unknown key has a different code on each server.
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (401, 403, 404):
            raise WrongCredentials(
                f"the S3 server at {endpoint} refused the keys ({code}): it was started with others",
                fix=f"set {ACCESS_KEY} and {SECRET_KEY} as they were then, or run `streamrl down` first",
            ) from error
        raise
    except HTTPClientError:
        return False
    finally:
        client.close()
    return True


def _client(endpoint: str, keys: Credentials) -> Any:
    # botocore takes half a second to import, and only a stack with S3 needs it.
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        # No proxy: it can't reach an address that only this machine has.
        config=Config(
            connect_timeout=2,
            read_timeout=5,
            retries={"total_max_attempts": 1},
            proxies={},
            s3={"addressing_style": "path"},
        ),
    )
