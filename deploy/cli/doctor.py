"""`tokenfleet doctor`: checks this machine and the settings, and says how to fix what would not work.

It starts and downloads nothing.
"""

import sys
from collections.abc import Iterator, Sequence

from rich.text import Text

from common.broker import acl
from common.settings.settings import SettingError, Settings
from deploy.cli.client import new_table, print_lines
from deploy.launcher import prepare
from deploy.launcher.prepare import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
ACL_FLAG = "--acl"
ACL_HELP = """
Users of the broker, with their rights in {pools} (--pool, --models):
{users}

No user can log in before it has a password: add >PASSWORD to its line in the ACL file (`aclfile` in
redis.conf, then ACL LOAD), or send ACL SETUSER with the words after `user`, and >PASSWORD at the end."""
DESCRIPTION = (
    "Check this machine and the settings, and say how to fix what would not work. Nothing is started or "
    "downloaded. Give it the settings that `tokenfleet serve` will get. With --acl, print the users of Redis "
    "that the processes of the pool need, as lines of an ACL file."
)


def main(argv: Sequence[str]) -> int:
    """Print the findings, or the rules of the broker's users. Returns 1 if one of the findings is a failure.
    Raises SettingError.
    """
    rest = [word for word in argv if word != ACL_FLAG]
    settings = Settings.read(rest, prog="tokenfleet doctor", description=DESCRIPTION)
    if ACL_FLAG in argv:
        return print_rules(settings.pools)
    prepare.set_hub_variables(settings)
    findings = dict(examine(settings))
    table = new_table(show_header=False)
    for name, finding in findings.items():
        fix = finding.fix and f"→ {finding.fix}"
        table.add_row(Text(finding.level, STYLES[finding.level]), name, Text(finding.found), Text(fix))
    print_lines(table)
    return 1 if any(finding.level == "fail" for finding in findings.values()) else 0


def print_rules(pools: Sequence[str]) -> int:
    """Print an ACL file: a line for each kind of user of the broker. What to do with it goes to stderr."""
    for kind in acl.USERS:
        print(f"user {kind} on {' '.join(acl.rules(kind, pools))}")
    users = "\n".join(f"  {kind}: {who}" for kind, who in acl.USERS.items())
    print(ACL_HELP.format(pools=", ".join(pools), users=users), file=sys.stderr)
    return 0


def examine(settings: Settings) -> Iterator[tuple[str, Finding]]:
    for name, check in prepare.CHECKS.items():
        try:
            yield name, check(settings)
        except prepare.TakenByFleet as error:
            yield name, Finding("warn", error.cause, "set PORT to another one for a second fleet")
        except SettingError as error:
            fix = prepare.FIXES.get(error.name, f"set {error.name.upper()}")
            yield name, Finding("fail", error.cause, fix)
