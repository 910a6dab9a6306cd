{{/* Environment of containers. */}}

{{/* "true" if pods may not download models. */}}
{{- define "batchllm.isOffline" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.readOnly -}}true{{- end -}}
{{- end -}}

{{- define "batchllm.env" -}}
{{- $env := dict
  "HOME" "/tmp"
  "TMPDIR" "/tmp"
  "XDG_CACHE_HOME" "/cache"
  "NUMBA_CACHE_DIR" "/cache/numba"
  "TORCHINDUCTOR_CACHE_DIR" "/cache/inductor"
  "TRITON_CACHE_DIR" "/cache/triton"
  "VLLM_CACHE_ROOT" "/cache/vllm"
  "HF_HOME" (ternary "/models" "/cache/huggingface" .Values.modelCache.enabled)
  "HF_HUB_DISABLE_TELEMETRY" "1"
  "VLLM_NO_USAGE_STATS" "1"
-}}
{{- if include "batchllm.isOffline" . -}}
{{- $_ := set $env "HF_HUB_OFFLINE" "1" -}}
{{- end -}}
{{- range $name, $value := merge (dict) .Values.pods.env $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* The named Secrets; arguments: root, kind (gpu or cpu). */}}
{{- define "batchllm.envFrom" -}}
{{- $secrets := .root.Values.secrets -}}
{{- $names := list $secrets.s3 -}}
{{- if eq .kind "cpu" -}}
{{- $names = append $names $secrets.catalog -}}
{{- end -}}
{{- if not (include "batchllm.isOffline" .root) -}}
{{- $names = append $names $secrets.huggingFace -}}
{{- end -}}
{{- range compact $names | uniq }}
- secretRef:
    name: {{ . | quote }}
{{- end }}
{{- end -}}
