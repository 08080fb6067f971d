"""From a checked request to its answers."""

from __future__ import annotations

from ddtree.errors import ConfigError
from ddtree.sampling.params import SamplingParams
from ddtree.server import parameters, unsupported
from ddtree.server.answers import Answers
from ddtree.server.http import ApiError
from ddtree.server.schemas import Generation
from ddtree.server.state import Serving


def check(serving: Serving, body: Generation, prompts: int = 1) -> None:
    """Raise ApiError for what can be told to be wrong before anything is encoded."""
    serving.check_model(body.model)
    unsupported.refuse(body)
    n = parameters.checked_count(body.n, serving.service.limits.max_n)
    most = serving.service.limits.max_waiting + serving.service.model.engine.max_rows
    if n * prompts > most:
        raise ApiError(
            400,
            f"the request asks for {n * prompts} answers: at most {most} fit at once",
            code="invalid_value",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
    try:
        serving.service.drafting.merged(body.ddtree).check_drafter(serving.service.model.engine.members)
    except ConfigError as error:
        raise ApiError(400, str(error), param="ddtree", code="invalid_value") from error


def ask(
    serving: Serving,
    body: Generation,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    silent: bool = False,
) -> Answers:
    """Submit n answers to each prompt, all or none. Of `silent` answers no token is told.

    Raises:
        DDTreeError: as `Service.submit_all`.
    """
    each = parameters.choices(params, body.n or 1)
    asked = [(prompt, one) for prompt in prompts for one in each]
    return Answers(serving.service, asked, len(each), body.ddtree, silent=silent)
