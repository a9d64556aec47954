"""The local stack: Apache Kafka, a Prefect server and, if wanted, an S3 server, as plain processes.

    streamrl up ──► local.up ──┬─► kafka           .streamrl/kafka   jars and the log's segments
                               ├─► s3              .streamrl/s3      objects as files
                               └─► prefect_server  .streamrl/prefect its database

Each is a `services.Service`; what runs is written in .streamrl/run/NAME.json, so that any later command
finds it. All of them listen on the loopback address only, unless STREAMRL_LISTEN names another one.
"""
