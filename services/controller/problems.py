"""Errors of the API as RFC 9457 problem details."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from relax.types import RelaxError
from services.controller.api import Problem
from services.controller.log import KeyConflict, UnknownOperation

MEDIA_TYPE = "application/problem+json"


class NotNow(RelaxError):
    """The run is in no state for this request."""


_STATUS: dict[type[RelaxError], HTTPStatus] = {
    UnknownOperation: HTTPStatus.NOT_FOUND,
    NotNow: HTTPStatus.CONFLICT,
    KeyConflict: HTTPStatus.UNPROCESSABLE_ENTITY,
}


def _problem(status: HTTPStatus, detail: str) -> JSONResponse:
    body = Problem(title=status.phrase, status=status.value, detail=detail)
    return JSONResponse(body.model_dump(), status_code=status.value, media_type=MEDIA_TYPE)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    return _problem(_STATUS[type(error)], str(error))  # type: ignore[index]


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return _problem(HTTPStatus.UNPROCESSABLE_ENTITY, wrong)


def add_problems(api: FastAPI) -> None:
    """Have these errors answered as problem details."""
    for kind in _STATUS:
        api.add_exception_handler(kind, _refused)
    api.add_exception_handler(RequestValidationError, _invalid)
