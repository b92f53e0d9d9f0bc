"""A dictionary in TransferQueue's place."""

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta


class InMemoryQueue:
    """What verl's trainers ask of TransferQueue: fields of rows by key, and tags of keys by partition."""

    def __init__(self, rows, tags=None):
        self.rows = {key: dict(fields) for key, fields in rows.items()}
        self.tags = tags or {}

    @classmethod
    def of_columns(cls, columns, keys):
        return cls({key: {name: values[row] for name, values in columns.items()} for row, key in enumerate(keys)})

    def kv_list(self):
        return self.tags

    def kv_clear(self, partition_id, keys):
        for key in keys:
            self.tags[partition_id].pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        held = set.intersection(*(set(self.rows[key]) for key in keys))
        columns = {name: [self.rows[key][name] for key in keys] for name in sorted(held & set(select_fields or held))}
        fields = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            if torch.is_tensor(values[0])
            else NonTensorStack(*values)
            for name, values in columns.items()
        }
        return TensorDict(fields, batch_size=[len(keys)])

    def kv_batch_put(self, keys, partition_id, fields, tags=None):
        for name in fields.keys():
            values = fields[name]
            values = values.unbind() if torch.is_tensor(values) else list(values)
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags or [{}] * len(keys))
