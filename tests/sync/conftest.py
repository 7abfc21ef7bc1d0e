from s3_server import s3, s3_url

__all__ = ["s3", "s3_url"]
