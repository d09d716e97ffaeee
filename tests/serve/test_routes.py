"""What is the same for all routes."""

import httpx


def test_unknown_route_has_openai_error(live_server):
    """Breaks: a client's typo in the address comes back in a form that its error class cannot read."""
    answer = httpx.get(f"{live_server}/v1/nothing")
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
