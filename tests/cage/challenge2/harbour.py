"""A scenario that has nothing in common with CAGE 2 but the kinds of table."""

from vecenv import cage

SSH, WEB, SMB = "ssh", "web", "smb"
_SSHD = cage.Service(22, SSH, "root")
_SAMBA = cage.Service(139, SMB, "SYSTEM")
_WEB = cage.Service(80, WEB, "www")

HARBOUR = cage.Scenario(
    name="Harbour",
    subnets=("Office", "Lab", "Plant", "Vault"),
    hosts=(
        cage.Host("desk0", "Office", "Linux", 0.0, (_SSHD,)),
        cage.Host("desk1", "Office", "Linux", 0.2, (_SSHD, _WEB), "ann", ("bench0",)),
        cage.Host("desk2", "Office", "Windows", 0.2, (_SAMBA,), None, ("bench1",)),
        cage.Host("bench0", "Lab", "Linux", 0.5, (_SSHD,), "ann", ("plc0",)),
        cage.Host("bench1", "Lab", "Windows", 0.5, (_SAMBA,), None, ("plc0",)),
        cage.Host("plc0", "Plant", "Linux", 2.0, (_SSHD, cage.Service(502)), "ann", ("safe",)),
        cage.Host("safe", "Vault", "Linux", 1.0, ()),  # listens on nothing
    ),
    traffic=(
        cage.TrafficRule("Office", "Plant", via=("bench0", "bench1")),
        cage.TrafficRule("Office", "Vault", via=("plc0",)),
        cage.TrafficRule("Vault", "Office", via=()),  # red never comes from there
    ),
    exploits=(
        cage.Exploit("Samba", 3.0, 139, SMB),
        cage.Exploit("Upload", 2.0, 80, WEB),
        cage.Exploit("Guess", 1.0, 22, SSH, is_brute_force=True),
    ),
    decoys=(
        cage.Decoy("DecoyWeb", 80, 80, WEB),
        cage.Decoy("DecoySamba", 139, 139, SMB, "Windows"),
    ),
    operational_service=cage.OperationalService("plc0", 5.0),
    foothold="desk0",
    b_line=cage.BLinePlan(
        steps=(
            cage.PlanStep("sweep", "Office"),
            *(
                cage.PlanStep(action, host)
                for host in (cage.FIRST_HOST, cage.NEXT_HOST, "plc0")
                for action in ("scan", "exploit", "escalate")
            ),
            cage.PlanStep("impact", "plc0"),
        ),
        on_failure=(0, 1, 2, 2, 2, 2, 5, 5, 5, 8, 9),
        next_hosts=(("desk1", "bench0"), ("desk2", "bench1")),
        verify_step=8,
        restart_step=1,
    ),
    meander=cage.MeanderPlan(forget_first=("plc0",), forget_next=("bench0", "bench1")),
    green_hosts=("desk1", "desk2"),
    rules=cage.Rules("harbour"),
)
