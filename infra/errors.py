"""The base class of all errors that explain themselves, and its subclasses.

Explained
├── BusError          Kafka                    infra.bus
├── StoreError        the object store         infra.stores.store
├── WeightsError      weights                  infra.weights
├── KeysError         signatures               infra.keys
├── RunError          a run's record           infra.runs
├── NotOurTopics      a broker's topics        infra.ownership
├── WaitedTooLong     a deadline               infra.waiting
├── TaskError         the user's task          producers.problems
├── EngineError       the engine               producers.engines
├── TrainingFailed    a step                   consumers.steps.failing
├── AnotherTrainer    two trainers of one run  consumers.steps.ledger
├── BadStep           a record of the ledger   infra.bad_step
├── Replaced          a newer start            infra.epochs
├── SkipError         a record to go past      infra.skipped
├── NeverFit          a sample                 consumers.stream.unfit
├── RanksError        a trainer's ranks        consumers.learners.collective
├── LockError         a lock between processes infra.files.locks
├── StackError        the local services       infra.stack
├── SuperviseError    a run's processes        infra.supervise
├── BalanceError      the number of generators flows.balancing
├── CannotChange      the same, just now       flows.balancing
├── RunFailed         a run                    flows
├── ProfilingFailed   a part of a run          flows.planning.profiled_learner
├── BadProfile        a profile's file         flows.planning.profile_file
├── WrongProfile      a profile of another run flows.planning.profile_identity
└── ExportError       a model's folder         flows.checkpoints.version_source
"""


class Explained(RuntimeError):
    """An error that says what happened, where, and what to do. People see its message without a traceback."""

    lasting: bool = False  # whether another start would meet it again, until somebody changes something
