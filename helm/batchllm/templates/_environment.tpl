{{/* Environment of containers. */}}

{{/* "true" if pods may not download models. */}}
{{- define "batchllm.isOffline" -}}
{{- if and .Values.modelCache.enabled .Values.modelCache.readOnly -}}true{{- end -}}
{{- end -}}

{{/* Variables of all pods that a stage runs in. */}}
{{- define "batchllm.env" -}}
{{- $env := dict "HF_HOME" (ternary "/models" "/cache/huggingface" .Values.modelCache.enabled) -}}
{{- range (first (include "batchllm.said" . | fromYaml).pod.spec.containers).env -}}
{{- $_ := set $env .name .value -}}
{{- end -}}
{{- if include "batchllm.isOffline" . -}}
{{- $_ := set $env "HF_HUB_OFFLINE" "1" -}}
{{- end -}}
{{- range $name, $value := merge (dict) .Values.pods.env $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Those of one kind of pod; arguments: root, gpu (nvidia, amd or cpu). */}}
{{- define "batchllm.kindEnv" -}}
{{- $own := .root.Values.pods.env -}}
{{- range (first (index (include "batchllm.said" .root | fromYaml).kinds .gpu).spec.containers).env }}
{{- if not (hasKey $own .name) }}
- name: {{ .name }}
  value: {{ .value | quote }}
{{- end }}
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
