"""S3 on loopback, played by moto: counts what it is asked, and refuses what it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


class S3Server:
    """Has one empty bucket, `bucket`. `environment` leads s3fs and boto3 to it.

    log: the method and the path, with the query, of every request.  refuses: tells of both whether it is answered 403;
    it may wait.  range_of: the range that is answered in place of the one that was asked for.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: Any) -> None:
                pass

        self.moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self.answer, threaded=True, request_handler=Silent)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.server.log = lambda *_: None  # moto stumbles over parts that come when their upload was aborted
        self.keys = {"AWS_ACCESS_KEY_ID": "made-up", "AWS_SECRET_ACCESS_KEY": "made-up-too"}
        self.environment = {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1", **self.keys}
        self.log: list[tuple[str, str]] = []
        self.refuses: Callable[[str, str], bool] = lambda *_: False
        self.range_of: Callable[[str], str] = str

    def __enter__(self) -> S3Server:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.empty()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        self.log.append(request)
        if self.refuses(*request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        if environ.get("HTTP_RANGE"):
            environ["HTTP_RANGE"] = self.range_of(environ["HTTP_RANGE"])
        return self.moto(environ, start_response)  # type: ignore[no-any-return]

    def client(self) -> Any:
        import boto3

        keys = {name.lower(): value for name, value in self.keys.items()}
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)

    def empty(self) -> None:
        """Begins again, with an empty bucket."""
        from urllib.request import Request, urlopen

        urlopen(Request(f"{self.url}/moto-api/reset", method="POST")).close()
        self.client().create_bucket(Bucket="bucket")
        self.log.clear()

    def held(self) -> tuple[dict[str, int], list[str]]:
        """The objects with their sizes, and the keys of uploads that have not ended."""
        client = self.client()
        objects = client.list_objects_v2(Bucket="bucket").get("Contents", [])
        uploads = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        return {each["Key"]: each["Size"] for each in objects}, [each["Key"] for each in uploads]
