"""From gates to the captured graph at its new sizes: tensors, shapes, averages."""
