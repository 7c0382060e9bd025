"""The bus: an asynchronous put/get field store with leases, over TransferQueue."""
