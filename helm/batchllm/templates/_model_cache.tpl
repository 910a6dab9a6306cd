{{/* Refuses a model cache that nothing fills: offline pods would find no models in it. */}}
{{- define "batchllm.modelCache.check" -}}
{{- $cache := .Values.modelCache -}}
{{- if not $cache.enabled -}}
{{- if $cache.prePull.enabled -}}
{{- fail "modelCache.prePull: there is no volume to download to; set modelCache.enabled" -}}
{{- end -}}
{{- else -}}
{{- if not (or $cache.existingClaim $cache.prePull.enabled (not $cache.readOnly)) -}}
{{- fail "modelCache: pods would be offline with an empty volume; list models in modelCache.prePull and enable it, name a claim that has them (modelCache.existingClaim), or let pods download into the volume (modelCache.readOnly: false)" -}}
{{- end -}}
{{- if and (eq (join "," $cache.accessModes) "ReadOnlyMany") (or $cache.prePull.enabled (not $cache.existingClaim)) -}}
{{- fail "modelCache.accessModes: nothing can be downloaded into a claim that is ReadOnlyMany and nothing else; add ReadWriteMany, or name a claim that is filled (modelCache.existingClaim) without modelCache.prePull" -}}
{{- end -}}
{{- end -}}
{{- end -}}
