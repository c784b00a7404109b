"""The tables of CAGE Challenge 2 (`Scenario2`), in its original and in its corrected version."""

from __future__ import annotations

from dataclasses import replace

from vecenv.cage.challenge2.network.scenario import (
    FIRST_HOST,
    NEXT_HOST,
    BLinePlan,
    Decoy,
    Exploit,
    Host,
    MeanderPlan,
    OperationalService,
    PlanStep,
    Rules,
    Scenario,
    Service,
    TrafficRule,
)

__all__ = ["RULE_SETS", "cage2_scenario"]

LINUX, WINDOWS = "Linux", "Windows"
_SSH, _WEB, _SMB = "ssh", "web server", "smb"

_SSHD = Service(22, _SSH, "root")
_SSHD_WINDOWS = Service(22, _SSH, "sshd_server")

_DEFENDER_SERVICES = (_SSHD, Service(53), Service(53), Service(68))
_ENTERPRISE_SERVICES = (
    _SSHD_WINDOWS,
    Service(135, "", "SYSTEM"),
    Service(3389, "rdp", "SYSTEM"),
    Service(445, "", "SYSTEM"),
    Service(139, "", "SYSTEM"),  # open, but not recognised as smb
    Service(80, _WEB, "NetworkService"),
    Service(443, _WEB, "NetworkService"),
)
_FTP_SERVICES = (_SSHD_WINDOWS, Service(21, "femitter", "SYSTEM"))
_USER2_SERVICES = (
    Service(445, _SMB, "SYSTEM"),
    Service(139, _SMB, "SYSTEM"),
    Service(135, "", "SYSTEM"),
    Service(3389, "rdp", "NetworkService"),
)
_USER3_SERVICES = (
    Service(80, _WEB, "www-data"),
    Service(3389, "mysql", "root"),  # the port of rdp, but another service
    Service(443, _WEB, "www-data"),
    Service(25, "smtp", "root"),
)
_USER4_SERVICES = (
    _SSHD,
    Service(80, _WEB, "www-data"),
    Service(3390, "mysql", "root"),
    Service(443, _WEB, "www-data"),
    Service(25, "smtp", "root"),
)


def _linux(
    name: str,
    subnet: str,
    value: float,
    services: tuple[Service, ...] = (_SSHD,),
    reveals: str = "",
) -> Host:
    return Host(name, subnet, LINUX, value, services, "pi", (reveals,) if reveals else ())


def _windows(
    name: str, subnet: str, value: float, services: tuple[Service, ...], reveals: str = ""
) -> Host:
    return Host(name, subnet, WINDOWS, value, services, "vagrant", (reveals,) if reveals else ())


_HOSTS = (
    Host("Defender", "Enterprise", LINUX, 0.1, _DEFENDER_SERVICES),
    _linux("Enterprise0", "Enterprise", 1.0),
    _windows("Enterprise1", "Enterprise", 1.0, _ENTERPRISE_SERVICES),
    _windows("Enterprise2", "Enterprise", 1.0, _ENTERPRISE_SERVICES, "Op_Server0"),
    _linux("Op_Host0", "Operational", 0.1),
    _linux("Op_Host1", "Operational", 0.1),
    _linux("Op_Host2", "Operational", 0.1),
    _linux("Op_Server0", "Operational", 1.0),
    _windows("User0", "User", 0.0, _FTP_SERVICES),
    _windows("User1", "User", 0.1, _FTP_SERVICES, "Enterprise1"),
    _windows("User2", "User", 0.1, _USER2_SERVICES, "Enterprise1"),
    _linux("User3", "User", 0.1, _USER3_SERVICES, "Enterprise0"),
    _linux("User4", "User", 0.1, _USER4_SERVICES, "Enterprise0"),
)

_EXPLOITS = (
    Exploit("FTPDirectoryTraversal", 7.0, 21, "femitter"),
    Exploit("HarakaRCE", 6.0, 25, "smtp"),
    Exploit("SQLInjection", 5.0, 3390, "mysql", needs_one_of=(80, 443)),
    Exploit("HTTPSRFI", 4.0, 443, _WEB),
    Exploit("HTTPRFI", 3.0, 80, _WEB),
    Exploit("EternalBlue", 2.0, 139, _SMB),
    Exploit("BlueKeep", 1.0, 3389, "rdp"),
    Exploit("SSHBruteForce", 0.1, 22, _SSH, is_brute_force=True),
)

_DECOYS = (
    Decoy("DecoyApache", 80, 80, _WEB),
    Decoy("DecoyFemitter", 21, 21, "femitter", WINDOWS),
    Decoy("DecoyHarakaSMPT", 25, 25, "smtp", LINUX),
    Decoy("DecoySmss", 139, 139, _SMB, WINDOWS),
    Decoy("DecoySSHD", 22, 22, _SSH),
    Decoy("DecoySvchost", 3389, 3389, "rdp", WINDOWS),
    Decoy("DecoyTomcat", 443, 443, _WEB),
    Decoy("DecoyVsftpd", 80, 21, _WEB, LINUX),  # opens another port than it checks
)

_B_LINE = BLinePlan(
    steps=(
        PlanStep("sweep", "User"),
        PlanStep("scan", FIRST_HOST),
        PlanStep("exploit", FIRST_HOST),
        PlanStep("escalate", FIRST_HOST),
        PlanStep("scan", NEXT_HOST),
        PlanStep("exploit", NEXT_HOST),
        PlanStep("escalate", NEXT_HOST),
        PlanStep("sweep", "Enterprise"),
        PlanStep("scan", "Enterprise2"),
        PlanStep("exploit", "Enterprise2"),
        PlanStep("escalate", "Enterprise2"),
        PlanStep("scan", "Op_Server0"),
        PlanStep("exploit", "Op_Server0"),
        PlanStep("escalate", "Op_Server0"),
        PlanStep("impact", "Op_Server0"),
    ),
    on_failure=(0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13),
    next_hosts=(
        ("User1", "Enterprise1"),
        ("User2", "Enterprise1"),
        ("User3", "Enterprise0"),
        ("User4", "Enterprise0"),
    ),
    verify_step=12,
    restart_step=1,
)

_ENTERPRISE_SERVERS = ("Enterprise0", "Enterprise1", "Enterprise2")
_OPERATIONAL_HOSTS = ("Op_Host0", "Op_Host1", "Op_Host2", "Op_Server0")
_USER_HOSTS = ("User0", "User1", "User2", "User3", "User4")

_FAITHFUL = Scenario(
    name="CAGE Challenge 2",
    subnets=("Enterprise", "Operational", "User"),
    hosts=_HOSTS,
    traffic=(TrafficRule("User", "Operational", via=_ENTERPRISE_SERVERS),),
    exploits=_EXPLOITS,
    decoys=_DECOYS,
    operational_service=OperationalService("Op_Server0", 10.0),
    foothold="User0",
    b_line=_B_LINE,
    meander=MeanderPlan(_OPERATIONAL_HOSTS, _ENTERPRISE_SERVERS),
    green_hosts=_USER_HOSTS + _ENTERPRISE_SERVERS,
    rules=Rules("faithful"),
)


def _debugged(faithful: Scenario) -> Scenario:
    """Return the tables as the corrected simulator has them."""
    as_smb = {139: "smb"}
    hosts = []
    for host in faithful.hosts:
        services = host.services
        if host.name in ("Enterprise1", "Enterprise2"):
            services = tuple(replace(s, process=as_smb.get(s.port, s.process)) for s in services)
        elif host.name == "User3":
            services = tuple(replace(s, port=3390) if s.port == 3389 else s for s in services)
        hosts.append(replace(host, services=services))
    decoys = tuple(replace(d, opens=d.checks) for d in faithful.decoys)
    rules = Rules(
        "debugged",
        charges_user_access=True,
        remove_reports_last_shell=True,
        shell_before_scan=True,
    )
    return replace(faithful, hosts=tuple(hosts), decoys=decoys, rules=rules)


_SCENARIOS = {"faithful": _FAITHFUL, "debugged": _debugged(_FAITHFUL)}
RULE_SETS = tuple(_SCENARIOS)


def cage2_scenario(rules: str = "faithful") -> Scenario:
    """Return the tables of CAGE Challenge 2.

    Args:
        rules: "faithful", the challenge as it was run, or "debugged", the corrected version.

    Raises:
        ValueError: Unknown rule set.
    """
    if rules not in _SCENARIOS:
        raise ValueError(f"rules must be one of {', '.join(RULE_SETS)}; got {rules!r}")
    return _SCENARIOS[rules]
