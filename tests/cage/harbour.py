"""A scenario that has nothing in common with CAGE 2 but the kinds of table."""

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

SSH, WEB, SMB = "ssh", "web", "smb"
_SSHD = Service(22, SSH, "root")
_SAMBA = Service(139, SMB, "SYSTEM")

HARBOUR = Scenario(
    name="Harbour",
    subnets=("Office", "Lab", "Plant", "Vault"),
    hosts=(
        Host("desk0", "Office", "Linux", 0.0, (_SSHD,)),
        Host("desk1", "Office", "Linux", 0.2, (_SSHD, Service(80, WEB, "www")), "ann", ("bench0",)),
        Host("desk2", "Office", "Windows", 0.2, (_SAMBA,), None, ("bench1",)),
        Host("bench0", "Lab", "Linux", 0.5, (_SSHD,), "ann", ("plc0",)),
        Host("bench1", "Lab", "Windows", 0.5, (_SAMBA,), None, ("plc0",)),
        Host("plc0", "Plant", "Linux", 2.0, (_SSHD, Service(502)), "ann", ("safe",)),
        Host("safe", "Vault", "Linux", 1.0, ()),  # listens on nothing
    ),
    traffic=(
        TrafficRule("Office", "Plant", via=("bench0", "bench1")),
        TrafficRule("Office", "Vault", via=("plc0",)),
        TrafficRule("Vault", "Office", via=()),  # red never comes from there
    ),
    exploits=(
        Exploit("Samba", 3.0, 139, SMB),
        Exploit("Upload", 2.0, 80, WEB),
        Exploit("Guess", 1.0, 22, SSH, is_brute_force=True),
    ),
    decoys=(Decoy("DecoyWeb", 80, 80, WEB), Decoy("DecoySamba", 139, 139, SMB, "Windows")),
    operational_service=OperationalService("plc0", 5.0),
    foothold="desk0",
    b_line=BLinePlan(
        steps=(
            PlanStep("sweep", "Office"),
            PlanStep("scan", FIRST_HOST),
            PlanStep("exploit", FIRST_HOST),
            PlanStep("escalate", FIRST_HOST),
            PlanStep("scan", NEXT_HOST),
            PlanStep("exploit", NEXT_HOST),
            PlanStep("escalate", NEXT_HOST),
            PlanStep("scan", "plc0"),
            PlanStep("exploit", "plc0"),
            PlanStep("escalate", "plc0"),
            PlanStep("impact", "plc0"),
        ),
        on_failure=(0, 1, 2, 2, 2, 2, 5, 5, 5, 8, 9),
        next_hosts=(("desk1", "bench0"), ("desk2", "bench1")),
        verify_step=8,
        restart_step=1,
    ),
    meander=MeanderPlan(forget_first=("plc0",), forget_next=("bench0", "bench1")),
    green_hosts=("desk1", "desk2"),
    rules=Rules("harbour"),
)
