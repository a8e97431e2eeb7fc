"""Says to people what is wrong with a bucket, and what to do about it, by the kind of fault that was met."""

from urllib.parse import urlsplit

from tiers.s3client import S3Settings


def describe(fault: str, settings: S3Settings) -> str:
    """Return one sentence for a kind of `ObjectFault`. Holds no credentials, not even those of an endpoint's URL."""
    where = _host(settings.endpoint)
    match fault:
        case "no_bucket":
            return f"there is no bucket {settings.bucket!r} at {where}: make it, or change s3.bucket or s3.endpoint"
        case "forbidden":
            return (
                f"{where} refuses our credentials for the bucket {settings.bucket!r}: they are wrong, or lack "
                "s3:ListBucket or the right to get, put and delete objects"
            )
        case "credentials":
            return (
                "no credentials were found: set s3.access_key_file and s3.secret_key_file, or give the daemon "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
            )
        case "connection":
            return f"{where} cannot be reached: is it up, and s3.endpoint right?"
        case _:
            return f"{where} does not answer as it should ({fault})"


def _host(endpoint: str) -> str:
    return urlsplit(endpoint).netloc.rpartition("@")[2] or "AWS"
