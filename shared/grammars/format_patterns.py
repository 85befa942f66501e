"""Regular expressions for formats of JSON schemas, without anchors and look-around, as all engines read them.

What they match is valid; some valid values, such as an IPv6 address with one zero left out, they leave out. Imports
nothing.
"""

# Formats that JSON Schema defines. Others (int32, binary, password, ...) annotate, as its specification has it.
FORMATS = frozenset({"date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"})
FORMATS |= {"ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer"}
FORMATS |= {"relative-json-pointer", "regex"}
_LEAP_YEARS = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEARS = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DATE = (
    f"({_YEARS}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEARS}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,29}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = "[A-Za-z0-9_+\\-]{1,30}"
_POINTER = r"(/([A-Za-z0-9._ %$@:+\-]|~[01]){0,60}){0,9}"
_HEX = "[0-9a-fA-F]"
# dates of months and leap years that exist; at most seven labels of 31 characters, which are less than 253; no 01.2.3.4
FORMAT_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}H)?|T[0-9]{1,9}[HMS]|[0-9]{1,9}Y([0-9]{1,9}M)?)",
    "email": f"{_WORD}(\\.{_WORD}){{0,3}}@{_LABEL}(\\.{_LABEL}){{0,3}}",
    "hostname": f"{_LABEL}(\\.{_LABEL}){{0,6}}",
    "ipv4": f"({_BYTE}\\.){{3}}{_BYTE}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}|::({_HEX}{{1,4}}:){{0,5}}{_HEX}{{1,4}}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]{{0,8}})(#|{_POINTER})",
    "uri": f"[a-z][a-z0-9+.\\-]{{0,20}}://{_LABEL}(\\.{_LABEL}){{0,3}}(:[0-9]{{1,4}})?(/[A-Za-z0-9._~\\-]{{0,60}}){{0,9}}",
}
