"""The local stack: Apache Kafka, a Prefect server and, if wanted, an S3 server, as plain processes.

    streamrl up ──► local.start_stack ──┬─► kafka           .streamrl/kafka   jars and the log's segments
                                        ├─► s3              .streamrl/s3      objects as files
                                        └─► prefect_server  .streamrl/prefect its database

Each is a `services.Service`. A running service is recorded in .streamrl/run/NAME.json, so that any later
command finds it. All services listen on the loopback address only, unless STREAMRL_LISTEN names another one.
"""
