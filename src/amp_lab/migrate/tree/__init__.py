"""A parsed file: its names and scopes, its training steps, and the findings of the rules.

A rule gets a `Rewriter`, here called `file`. Most questions of a rule have an answer already:

| question | answer |
|---|---|
| How are names imported and used? | `file.tree.uses`, with `Use.origins` |
| What are all calls? | `file.tree.calls`, each with its `Scope` |
| To which function of torch does a name or a call refer? | `CodeReader.origin`, `called_origin` |
| What was assigned to a name? | `Scope.value_of`, `Scope.only_binding`, `Tree.assigned_values` |
| What is the code of a node? | `Tree.code` |
| What is around a node, such as a ``with``? | `Tree.ancestors`, `Tree.around`, `Tree.is_in` |
| What are the parts of ``a.b.c``? | `nodes.name_parts` |
| Is this the method ``x.half()``? | `nodes.receiver_of` |
| Where are the training steps? | `file.code.by_kind`, by the kinds of `Event` |
| Which events run before or after this one? | `CodeUnit.before`, `CodeUnit.after`, `Place` |
| Which scalers are there, and which are disabled? | `CodeReader.scaler_calls`, `disabled_scalers` |
| Is this scaler or autocast turned off? | `CodeReader.is_disabled` |
| Is this autocast enabled in each run? | `float16_values.is_always_enabled` |
| Is this autocast surely for CUDA? | `float16_values.is_for_cuda` |
| Is this an optimizer? | `CodeReader.is_optimizer`, `is_optimizer_step` |
| Is this a model? | `float16_values.is_model` |
| Are weights cast to float16? | `float16_values.casts_to_float16` |
| Does a call run under ``no_grad``? | `float16_values.is_under_no_grad` |
| Was a loss computed in float16? | `Float16Values.cast_of_loss` |
| Which names have autocast and the scaler, old and new? | `amp_names` |
"""
