"""JSON schemas of `benchmarks.structured_outputs`: fixed forms, and schemas drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Schema = dict[str, Any]


def form(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def one_of(*values: str) -> Schema:
    return {"enum": [*values]}


def whole(least: int = 0, most: int = 100) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": f"^{pattern}$"}


YES_NO: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "format": "date"}
WORD: Schema = matching("[a-z]{2,8}")
SENTENCE: Schema = {"type": "string", "maxLength": 60}

# Every name and every separator follows from the schema; the values are short. What clients send to fill in a form.
FIXED: Mapping[str, Schema] = {
    "ticket": form(priority=one_of("low", "medium", "high"), category=one_of("billing", "technical", "account"), escalate=YES_NO),
    "sentiment": form(sentiment=one_of("positive", "negative", "neutral"), confidence_percent=whole(), contains_sarcasm=YES_NO),
    "address": form(
        house_number=whole(1, 999), street_name=WORD, city_name=WORD, postal_code={"type": "string", "pattern": "^[0-9]{5}$"}
    ),
    "flight": form(
        departure_airport=matching("[A-Z]{3}"),
        arrival_airport=matching("[A-Z]{3}"),
        departure_date=DATE,
        number_of_passengers=whole(1, 9),
        cabin_class=one_of("economy", "premium", "business"),
    ),
    "device": form(
        device=form(manufacturer=WORD, operating_system=one_of("linux", "windows", "macos"), memory_gigabytes=whole(1, 512)),
        network=form(connection_type=one_of("wifi", "ethernet"), signal_strength_percent=whole()),
    ),
    "review": form(rating_out_of_five=whole(1, 5), would_recommend=YES_NO, verified_purchase=YES_NO, helpful_votes=whole()),
    "moderation": form(
        contains_violence=YES_NO, contains_hate_speech=YES_NO, contains_personal_information=YES_NO, contains_spam=YES_NO
    ),
    "weather_call": form(
        name={"const": "get_current_weather"}, arguments=form(location=WORD, temperature_unit=one_of("celsius", "fahrenheit"))
    ),
    "invoice": form(
        invoice_number=whole(1, 99999), invoice_date=DATE, currency_code=one_of("EUR", "USD", "GBP"), total_amount=whole(1, 9999)
    ),
    "patient": form(
        date_of_birth=DATE,
        blood_type=one_of("A", "B", "AB", "O"),
        currently_smoking=YES_NO,
        systolic_blood_pressure=whole(80, 200),
    ),
}
RECURSIVE: Schema = {
    "$defs": {"node": form(name=WORD, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})},
    "$ref": "#/$defs/node",
}
LEAVES: Sequence[Schema] = (
    YES_NO,
    DATE,
    WORD,
    SENTENCE,
    whole(),
    whole(-5, 5),
    one_of("red", "green", "blue"),
    {"const": 42},
    {"type": "null"},
    {"type": "string", "minLength": 2, "maxLength": 12},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -10, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": ["integer", "null"], "minimum": 0},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, one_of("none")]},
    {"type": "array", "items": whole(0, 9), "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [WORD, YES_NO], "items": False, "minItems": 2},
)
NAMES = ("name", "title", "size", "colour", "weight", "active", "tags", "count", "note", "kind", "start", "end", "score", "items")
KINDS = ("leaf", "form", "form", "optional", "array", "anyOf", "allOf", "map", "defs")
INNERMOST = 2  # levels below the root


def random_schema(random: np.random.Generator, depth: int = 0) -> Schema:
    """A schema of up to three levels; the root is an object or an array."""
    kind = str(random.choice(KINDS if depth == 0 else KINDS[:-1])) if depth < INNERMOST else "leaf"
    if kind == "leaf":
        return dict(LEAVES[int(random.integers(len(LEAVES)))]) if depth else form(value=random_schema(random, INNERMOST))
    if kind == "array":
        return {"type": "array", "items": random_schema(random, depth + 1), "minItems": 1, "maxItems": 3}
    if kind == "map":
        values = random_schema(random, INNERMOST)
        return {"type": "object", "additionalProperties": values, "minProperties": 1, "maxProperties": 3}
    names = [str(name) for name in random.choice(NAMES, int(random.integers(1, 5)), replace=False)]
    if kind == "defs":
        parts: dict[str, Schema] = {name: {"$ref": "#/$defs/part"} for name in names}
        return {"$defs": {"part": random_schema(random, INNERMOST)}, **form(**parts)}
    inner = {name: random_schema(random, depth + 1) for name in names}
    if kind == "optional":
        return form(**inner) | {"required": names[: int(random.integers(0, len(names)))]}
    if kind == "anyOf":
        return {"anyOf": [form(**{name: one}) for name, one in inner.items()]}
    return {"allOf": [form(**inner)]} if kind == "allOf" else form(**inner)


def schemas(count: int, seed: int) -> dict[str, Schema]:
    """The fixed forms, a recursive schema, and random ones, ``count`` different ones in all."""
    random, found = np.random.default_rng(seed), {**FIXED, "recursive": RECURSIVE}
    while len(found) < count:
        drawn = random_schema(random)
        if drawn not in found.values():
            found[f"random_{len(found)}"] = drawn
    return found
